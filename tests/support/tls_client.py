"""Rows by TCP under TLS, as docs/explanation/frames.md tells it to who has another program: by OpenSSL and by hand."""

from __future__ import annotations

import ctypes
import hmac
import socket
import struct
from collections.abc import Callable
from ctypes import CFUNCTYPE, POINTER, c_char, c_char_p, c_uint, c_void_p
from typing import Any

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from geartrain.ams.kernels import _core
from tests.support import frame_codec

_KeyOf = CFUNCTYPE(c_uint, c_void_p, c_char_p, POINTER(c_char), c_uint, POINTER(c_char), c_uint)
_KeyLog = CFUNCTYPE(None, c_void_p, c_char_p)
HANDSHAKE, DATA = 22, 23
KEY_UPDATE = bytes((24, 0, 0, 1, 0))


def _openssl() -> Callable[..., int]:
    library = ctypes.CDLL("libssl.so.3")

    def call(name: str, *given: Any) -> int:
        function = library[name]
        function.restype = c_void_p
        return function(*(c_void_p(one) if isinstance(one, int) else one for one in given)) or 0

    return call


class TlsClient:
    """Connected and with its keys; the hello is to be sent. What it sends it makes itself, record by record."""

    def __init__(self, server: _core.DataServer) -> None:
        while True:
            _, secret, port = server.offer()
            if 0 not in secret[:16]:  # such a name is no text of C
                break
        self.hello = frame_codec.header(3, 0, 0, 32) + secret
        self.socket = socket.create_connection(("127.0.0.1", port))
        openssl = _openssl()
        keys: dict[str, bytes] = {}

        def key_of(_: int, __: bytes, name: Any, ___: int, key: Any, ____: int) -> int:
            ctypes.memmove(name, secret[:16] + b"\0", 17)
            ctypes.memmove(key, secret[16:], 16)
            return 16

        def log(_: int, line: bytes) -> None:
            label, _, value = line.split()
            keys[label.decode()] = bytes.fromhex(value.decode())

        self._kept = _KeyOf(key_of), _KeyLog(log)
        context = openssl("SSL_CTX_new", openssl("TLS_client_method"))
        openssl("SSL_CTX_set_keylog_callback", context, self._kept[1])
        ssl = openssl("SSL_new", context)
        openssl("SSL_set_psk_client_callback", ssl, self._kept[0])
        openssl("SSL_set_fd", ssl, self.socket.fileno())
        assert openssl("SSL_connect", ssl) == 1
        openssl("SSL_free", ssl)
        openssl("SSL_CTX_free", context)
        self.socket.settimeout(20.0)
        self._secret = keys["CLIENT_TRAFFIC_SECRET_0"]
        self._number = 0

    def __enter__(self) -> TlsClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, kind: int, data: bytes) -> None:
        self.socket.sendall(self.record(kind, data))

    def record(self, kind: int, data: bytes) -> bytes:
        """The next one, encrypted."""
        key, start = self._expanded(b"key", 16), self._expanded(b"iv", 12)
        nonce = (int.from_bytes(start, "big") ^ self._number).to_bytes(12, "big")
        self._number += 1
        head = struct.pack(">BHH", DATA, 0x0303, len(data) + 17)
        return head + AESGCM(key).encrypt(nonce, data + bytes((kind,)), head)

    def key_update(self) -> bytes:
        """What tells that the next record is under another key."""
        told = self.record(HANDSHAKE, KEY_UPDATE)
        self._secret, self._number = self._expanded(b"traffic upd", 32), 0
        return told

    def _expanded(self, label: bytes, size: int) -> bytes:
        label = b"tls13 " + label
        info = struct.pack(">HB", size, len(label)) + label + b"\0\1"
        return hmac.digest(self._secret, info, "sha256")[:size]
