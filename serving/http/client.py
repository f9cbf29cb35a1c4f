"""Client of a running model service, with the certificates and the token of this process."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import urllib.parse
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from types import MappingProxyType
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
_NONE: Mapping[str, str] = MappingProxyType({})


def request_json(address: str, method: str, path: str, body: Any = None, *, timeout_seconds: float = 60.0) -> Any:
    """Return the JSON answer of the service at ``"host:port"``.

    Raises Unavailable (no answer there), AccessDenied, InvalidArgument, NotServed: with its message.
    """
    data = None if body is None else json.dumps(body).encode()
    with closing(connection_to(address, timeout_seconds)) as connection:
        _, answer = send_request(connection, address, method, path, data, {"Content-Type": "application/json"})
    try:
        return json.loads(answer)
    except ValueError as exc:
        raise _nobody(address, exc) from exc


def send_request(
    connection: http.client.HTTPConnection,
    address: str,
    method: str,
    path: str,
    body: bytes | None = None,
    headers: Mapping[str, str] = _NONE,
) -> tuple[http.client.HTTPMessage, bytes]:
    """Return headers and body of a service's answer; the connection may be reused for the next request.

    Retries once if the service had closed a reused connection. Raises as :func:`request_json`.
    """
    was_kept, said = connection.sock is not None, {"Host": address, **headers}
    if isinstance(connection, http.client.HTTPSConnection) and (token := token_path()) is not None:
        said |= dict(token_file(token).metadata())
    try:
        connection.request(method, urllib.parse.quote(path), body, said)
        response = connection.getresponse()
        answer = response.read()
        error = json.loads(answer)["error"] if response.status >= 400 else None
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as exc:
        connection.close()
        if was_kept and isinstance(exc, ConnectionError):
            return send_request(connection, address, method, path, body, headers)
        raise _nobody(address, exc) from exc
    if error is not None:
        message = error["message"] if isinstance(error, dict) else error  # the inference protocol has the text alone
        raise _ERRORS.get(response.status, InternalError)(f"{address} refuses: {message}")
    return response.headers, answer


def _nobody(address: str, why: Exception) -> Unavailable:
    return Unavailable(f"no service of models answers at {address}: {why}; 'geartrain serve' prints the address of one")


class _TlsConnection(http.client.HTTPSConnection):
    """Connection to a service whose certificate has the name of a role, not of a host."""

    def __init__(self, host: str, port: int, timeout: float, context: ssl.SSLContext, name: str) -> None:
        super().__init__(host, port, timeout=timeout, context=context)
        self._tls, self._name = context, name

    def connect(self) -> None:
        plain = socket.create_connection((self.host, self.port), self.timeout)
        self.sock = self._tls.wrap_socket(plain, server_hostname=self._name)


def connection_to(address: str, timeout_seconds: float) -> http.client.HTTPConnection:
    """Return a connection to the service at an address; the first request opens it."""
    host, port = split_address(address)
    folder, role = identity(address)
    if folder is None or (is_loopback(address) and not is_identified()):
        return http.client.HTTPConnection(host, port, timeout=timeout_seconds)
    context = ssl.create_default_context(cafile=str(Path(folder) / CA_FILE))
    context.load_cert_chain(Path(folder) / f"{role}.pem")
    return _TlsConnection(host, port, timeout_seconds, context, host_of(Credentials.mine(address).cluster, "serve"))
