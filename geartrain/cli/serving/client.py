"""Asks a service of models that runs, as its commands do: under the certificates and the token of this process."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import urllib.parse
from pathlib import Path
from typing import Any

from geartrain.ams.rpc.credentials import CA_FILE, Credentials, host_of
from geartrain.ams.rpc.tokens import token_file
from geartrain.ams.values.config import identity, is_identified, is_loopback, split_address, token_path
from geartrain.ams.values.errors import (
    AccessDenied,
    Busy,
    GeartrainError,
    InternalError,
    InvalidArgument,
    NotServed,
    Unavailable,
)

_ERRORS: dict[int, type[GeartrainError]] = {
    400: InvalidArgument,
    401: AccessDenied,
    403: AccessDenied,
    404: NotServed,
    503: Busy,
}


def ask_service(address: str, method: str, path: str, body: Any = None, *, timeout_seconds: float = 60.0) -> Any:
    """The JSON that the service at ``"host:port"`` answers.

    Raises Unavailable (nobody answers there), AccessDenied, InvalidArgument, NotServed: with its sentence.
    """
    connection = _connection(address, timeout_seconds)
    headers = {"Content-Type": "application/json", "Host": address}
    if isinstance(connection, http.client.HTTPSConnection) and (token := token_path()) is not None:
        headers |= dict(token_file(token).metadata())
    try:
        data = None if body is None else json.dumps(body)
        connection.request(method, urllib.parse.quote(path), data, headers)
        response = connection.getresponse()
        said = json.loads(response.read())
    except (OSError, http.client.HTTPException, ValueError) as exc:
        raise Unavailable(
            f"no service of models answers at {address}: {exc}; 'geartrain serve' prints the address of one"
        ) from exc
    finally:
        connection.close()
    if response.status >= 400:
        message = said.get("error", {}).get("message", "") if isinstance(said, dict) else ""
        raise _ERRORS.get(response.status, InternalError)(f"{address} refuses: {message}")
    return said


def _connection(address: str, timeout_seconds: float) -> http.client.HTTPConnection:
    host, port = split_address(address)
    folder, role = identity(address)
    if folder is None or (is_loopback(address) and not is_identified()):
        return http.client.HTTPConnection(host, port, timeout=timeout_seconds)
    context = ssl.create_default_context(cafile=str(Path(folder) / CA_FILE))
    context.load_cert_chain(Path(folder) / f"{role}.pem")
    name = host_of(Credentials.mine(address).cluster, "serve")
    connection = http.client.HTTPSConnection(host, port, timeout=timeout_seconds, context=context)
    plain = socket.create_connection((host, port), timeout_seconds)
    connection.sock = context.wrap_socket(plain, server_hostname=name)
    return connection
