"""Credentials of a process: every gRPC channel and port is opened with them.

A folder has ``ca.pem``, the trusted authorities (several while one replaces another), and for each role ``ROLE.pem``: a
private key, and a certificate that names cluster, role and number as ``geartrain://CLUSTER/ROLE/N``. Both ends show
theirs (mutual TLS). A client verifies the name ``ROLE.CLUSTER.geartrain``, or that of a shard,
``N.server.CLUSTER.geartrain``, so that no certificate has addresses; a server checks the caller's role
(:mod:`geartrain.ams.rpc.server.access`). Changed files are reloaded, at most once a second: ports show the new ones to
new connections, channels reconnect.
"""

from __future__ import annotations

import datetime
import functools
import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import grpc

from geartrain.ams.rpc.tokens import others_may_read, token_file
from geartrain.ams.values.config import CLIENT, identity, private_folder, token_path
from geartrain.ams.values.errors import ConfigError

if TYPE_CHECKING:
    import socket
    import ssl

    from cryptography.x509 import Certificate

logger = logging.getLogger(__name__)

CA_FILE = "ca.pem"
SCHEME = "geartrain://"
ANY_NUMBER = "*"
_NAME = re.compile(rf"{SCHEME}([a-z0-9-]+)/([a-z]+)/(\d+|\*)", re.ASCII)
_POLL_SECONDS = 1.0
_RESOLVE_AGAIN_SECONDS = 1.0
UNRESOLVED = ("errors resolving", "dns resolution failed")
"""Beginnings of gRPC's error text for an address whose name could not be resolved."""
_Metadata = tuple[tuple[str, str], ...]
_WARN_SECONDS = 86_400.0
"""Interval of warnings about a certificate that expires soon."""
_LAST_SHARE = 1 / 6
"""Last share of a certificate's validity, in which warnings are logged."""


class Name(NamedTuple):
    """Name of a certificate's holder."""

    cluster: str
    role: str
    number: str
    """Number of a shard; ANY_NUMBER: of all."""

    def __str__(self) -> str:
        return f"{self.role}/{self.number}"


def name_in(uri: str) -> Name | None:
    """Return the name in ``geartrain://CLUSTER/ROLE/N``; None: it has another form."""
    found = _NAME.fullmatch(uri)
    return Name(*found.groups()) if found else None


def host_of(cluster: str, role: str | None, number: str | None = None) -> str:
    """Return the DNS name in a role's certificate, or in one shard's; without a role the one of all roles."""
    return ".".join((*filter(None, (number, role)), cluster, "geartrain"))


class _Files(NamedTuple):
    authorities: bytes
    key: bytes
    certificate: bytes
    names: tuple[Name, ...]
    warn_at: float
    """Unix time from which warnings are logged."""


class Credentials:
    """Factory of the channels and ports of this process, with its certificates or without any. Thread-safe."""

    def __init__(self, folder: str | None, role: str, token: str | None = None) -> None:
        """Read the certificate of ``role`` in ``folder``, and the token in a file. Raises ConfigError for bad ones."""
        if token is not None and folder is None:
            raise ConfigError(
                "security.token is set, and security.folder is not: a token is sent only under TLS; name the folder of "
                "certificates, or unset the token (GEARTRAIN_SECURITY__TOKEN)"
            )
        self.folder = folder
        self._token = None if token is None else token_file(token)
        self._paths = None if folder is None else (Path(folder) / CA_FILE, Path(folder) / f"{role}.pem")
        self._role = role
        self._lock = threading.Lock()
        self._look_at = 0.0
        self._stamp: object = None
        self._warned_at = 0.0
        self._complaint = ""
        self._files: _Files | None = None
        self._accepts: tuple[_Files, ssl.SSLContext] | None = None
        self._current()

    @staticmethod
    def mine(address: str) -> Credentials:
        """Return the credentials of this process for an end of ``"host:port"``. Raises ConfigError."""
        folder, role = identity(address)
        return _credentials(folder, role, token_path() if role == CLIENT else None)

    @property
    def names(self) -> tuple[Name, ...]:
        """Names in this process's certificate; none: it has no certificate."""
        files = self._current()
        return () if files is None else files.names

    def trusts(self, certificate: bytes, chain: bytes = b"") -> bool:
        """Return whether a peer's certificate (PEM, with intermediates) is trusted by the present ``ca.pem``."""
        files = self._current()
        return files is not None and _is_trusted(files.authorities, certificate, chain)

    @property
    def cluster(self) -> str:
        """Name of the cluster in the certificate; "local": there is none."""
        return self.names[0].cluster if self.names else "local"

    @property
    def first_shard(self) -> int | None:
        """Lowest shard that the certificate allows; None: any."""
        numbers = [int(name.number) for name in self.names if name.role == "server" and name.number != ANY_NUMBER]
        return min(numbers, default=None)

    def channel(
        self, address: str, options: Sequence[tuple[str, Any]], role: str | None = None, shard: int | None = None
    ) -> Any:
        """Open a grpc.Channel to a process of ``role``, or to ``shard``; None: to any."""
        token = tuple if self._token is None else self._token.metadata
        return _Channel(self._current, address, options, role, shard, token)

    def open_port(self, server: grpc.Server, listen: str, begun: Callable[[], None] = lambda: None) -> int:
        """Bind ``server`` to ``"host:port"``; return the port, 0 if it cannot be bound.

        ``begun`` is called at the start of each handshake.
        """
        if (files := self._current()) is None:
            return server.add_insecure_port(listen)
        shown = files

        def renewed() -> Any:  # None: unchanged
            nonlocal shown
            begun()
            if (files := self._current()) is shown or files is None:
                return None
            shown = files
            return _shown(files)

        return server.add_secure_port(
            listen, grpc.dynamic_ssl_server_credentials(_shown(files), renewed, require_client_authentication=True)
        )

    def accept(self, connection: socket.socket) -> socket.socket:
        """Return a connection to a port other than gRPC's, once its certificate is of this cluster (mutual TLS).

        Raises OSError: it shows none, or another cluster's. Without certificates every connection is accepted.
        """
        if (files := self._current()) is None:
            return connection
        if self._accepts is None or self._accepts[0] is not files:
            self._accepts = files, self._context(files)
        secure = self._accepts[1].wrap_socket(connection, server_side=True)
        said: Any = (secure.getpeercert() or {}).get("subjectAltName", ())
        names = [name_in(text) for kind, text in said if kind == "URI"]
        if not any(name is not None and name.cluster == self.cluster for name in names):
            secure.close()
            raise ConnectionRefusedError(f"its certificate is of another cluster than {self.cluster!r}")
        return secure

    def https(self, *, shows_certificate: bool) -> tuple[ssl.SSLContext, Callable[[], None]]:
        """Return the TLS context of an HTTPS port; ``shows_certificate``: each client must show one of this cluster.

        The returned function, called from time to time, loads changed files; a removed authority is trusted until a
        restart.
        """
        import ssl

        files = self._current()
        assert files is not None
        context = self._context(files)
        if not shows_certificate:
            context.verify_mode = ssl.CERT_NONE

        def renew() -> None:
            nonlocal files
            if (found := self._current()) is not files and found is not None:
                files = found
                self._load(context, found)

        return context, renew

    def _context(self, files: _Files) -> ssl.SSLContext:
        import ssl

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        self._load(context, files)
        return context

    def _load(self, context: ssl.SSLContext, files: _Files) -> None:
        assert self._paths is not None
        context.load_verify_locations(cadata=files.authorities.decode())
        context.load_cert_chain(self._paths[1])

    def _current(self) -> _Files | None:
        if self._paths is None or time.monotonic() < self._look_at:
            return self._files
        with self._lock:
            self._look_at = time.monotonic() + _POLL_SECONDS
            try:
                # ctime, as chmod is a change too.
                stamp = [(stat.st_ino, stat.st_ctime_ns) for stat in (path.stat() for path in self._paths)]
                if stamp != self._stamp:
                    self._stamp = stamp
                    self._files = _read(*self._paths, self._role)
            except (OSError, ConfigError) as exc:
                if self._files is None:
                    if isinstance(exc, FileNotFoundError):
                        raise ConfigError(_missing(Path(exc.filename), self._role)) from exc
                    raise
                if self._complaint != (complaint := str(exc)):
                    self._complaint = complaint
                    logger.warning("keeping the present certificate: %s", complaint)
            assert self._files is not None
            if self._files.warn_at < time.time() > self._warned_at + _WARN_SECONDS:
                self._warned_at = time.time()
                logger.warning("%s expires soon; renew it without a restart: 'geartrain certs renew'", self._paths[1])
            return self._files


@functools.cache
def _credentials(folder: str | None, role: str, token: str | None) -> Credentials:
    return Credentials(folder, role, token)


def _shown(files: _Files) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(files.key, files.certificate)], files.authorities)


def _missing(path: Path, role: str) -> str:
    if path.parent == private_folder():
        return f"{path} does not exist; remove {path.parent}, and the next 'geartrain up' makes it anew"
    if path.name == CA_FILE:
        return (
            f"security.folder {str(path.parent)!r} has no {CA_FILE}; 'geartrain certs init {path.parent}' makes a "
            "cluster's first, and 'geartrain certs issue', where that is, the folder of another machine"
        )
    return f"{path} does not exist; 'geartrain certs issue {path.parent} {role}' makes it where ca.key is (--ca)"


def _read(authorities: Path, own: Path, role: str) -> _Files:
    """Read the files of a role; raises ConfigError, with the remedy, for files that no peer would accept."""
    if others_may_read(own.stat()):
        raise ConfigError(f"{own} has a private key and is open to other users of this machine: chmod 600 {own}")
    # Imported only where there are certificates.
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    pem = own.read_bytes()
    try:
        key = load_pem_private_key(pem, None)
        certificate, *more = x509.load_pem_x509_certificates(pem)
        trusted = authorities.read_bytes()
        issuers = x509.load_pem_x509_certificates(trusted)
    except (ValueError, TypeError) as exc:
        raise ConfigError(
            f"{own} or {authorities} is damaged: {exc}; issue it again ('geartrain certs issue')"
        ) from exc
    # Files that are copied one after the other are not used before they match.
    if key.public_key() != certificate.public_key():
        raise ConfigError(f"{own} has the key of another certificate; issue it again ('geartrain certs issue')")
    if not any(_issued(issuer, [certificate, *more][-1]) for issuer in issuers):
        raise ConfigError(
            f"{own} is of an authority that is not in {authorities}; copy the {CA_FILE} from where it was issued, or "
            "issue it again ('geartrain certs issue')"
        )
    names = names_of(certificate)
    if role not in {name.role for name in names}:
        said = ", ".join(map(str, names)) or "nobody"
        raise ConfigError(f"{own} is the certificate of {said}, not of a {role}; issue one ('geartrain certs issue')")
    now = datetime.datetime.now(datetime.UTC)
    if certificate.not_valid_before_utc > now:
        raise ConfigError(
            f"{own} is good from {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC on, and here it is "
            f"{now:%Y-%m-%d %H:%M}; set the clock of this machine, or of the one that issued it"
        )
    if certificate.not_valid_after_utc < now:
        raise ConfigError(
            f"{own} ran out at {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC; "
            f"'geartrain certs renew {own.parent} --ca ...' renews it where ca.key is"
        )
    life = certificate.not_valid_after_utc - certificate.not_valid_before_utc
    warn_at = (certificate.not_valid_after_utc - life * _LAST_SHARE).timestamp()
    return _Files(trusted, pem, pem, names, warn_at)


def _issued(authority: Certificate, certificate: Certificate) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


@functools.lru_cache(4096)
def _is_trusted(authorities: bytes, certificate: bytes, chain: bytes) -> bool:
    from cryptography import x509

    trusted = x509.load_pem_x509_certificates(authorities)
    between = x509.load_pem_x509_certificates(chain) if chain else []
    above: Certificate | None = x509.load_pem_x509_certificate(certificate)
    while above is not None and not any(_issued(authority, above) for authority in trusted):
        below = above
        between = [other for other in between if other != below]
        above = next((other for other in between if _issued(other, below)), None)
    return above is not None


def names_of(certificate: Certificate) -> tuple[Name, ...]:
    """Return the names in a certificate."""
    from cryptography import x509

    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    uris = found.get_values_for_type(x509.UniformResourceIdentifier)
    return tuple(name for name in map(name_in, uris) if name is not None)


class _Channel:
    """A grpc.Channel to an address that connects with the newest certificates.

    gRPC caches a failed name resolution and backs off, up to two minutes. So after a call that failed in this way the
    next one, a second later or more, uses a new channel that resolves at once.
    """

    def __init__(
        self,
        current: Any,
        address: str,
        options: Sequence[tuple[str, Any]],
        role: str | None,
        shard: int | None,
        token: Callable[[], _Metadata],
    ) -> None:
        self._current, self._address, self._options = current, address, options
        self._role, self._shard = role, shard
        self.token = token
        """Function that returns each call's metadata with the token."""
        self._lock = threading.Lock()
        self._is_closed = False
        self._files = current()
        self._channel = self._opened(self._files)

    def now(self) -> grpc.Channel:
        """Return the channel for the next call. An older one is left to the calls under way on it."""
        files = self._current()
        if files is not self._files or self._is_unresolved:
            with self._lock:
                is_due = self._is_unresolved and time.monotonic() - self._opened_at > _RESOLVE_AGAIN_SECONDS
                if (files is not self._files or is_due) and not self._is_closed:
                    self._channel, self._files = self._opened(files), files
        return self._channel

    def ended(self, call: Any) -> None:
        """Record whether a call failed because the address could not be resolved."""
        if call.code() is grpc.StatusCode.UNAVAILABLE and (call.details() or "").lower().startswith(UNRESOLVED):
            self._is_unresolved = True

    def _opened(self, files: _Files | None) -> grpc.Channel:
        self._is_unresolved, self._opened_at = False, time.monotonic()
        if files is None:
            return grpc.insecure_channel(self._address, options=self._options)
        cluster = files.names[0].cluster
        # A process with the certificate of all shards, such as one machine's, could serve in its place.
        is_any = self._shard is None or Name(cluster, "server", ANY_NUMBER) in files.names
        name = host_of(cluster, self._role, None if is_any else str(self._shard))
        options = [*self._options, ("grpc.ssl_target_name_override", name)]
        shown = grpc.ssl_channel_credentials(files.authorities, files.key, files.certificate)
        return grpc.secure_channel(self._address, shown, options=options)

    def unary_unary(self, path: str, **codecs: Any) -> _Method:
        return _Method(self, "unary_unary", path, codecs)

    def unary_stream(self, path: str, **codecs: Any) -> _Method:
        return _Method(self, "unary_stream", path, codecs)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Method:
    """One RPC of a channel, on its newest connection."""

    def __init__(self, channel: _Channel, kind: str, path: str, codecs: dict[str, Any]) -> None:
        self._channel, self._kind, self._path, self._codecs = channel, kind, path, codecs
        self._made: tuple[grpc.Channel | None, Any] = None, None

    def _now(self) -> Any:
        channel, method = self._made
        if channel is not (newest := self._channel.now()):
            method = getattr(newest, self._kind)(self._path, **self._codecs)
            self._made = newest, method
        return method

    def _with_token(self, metadata: _Metadata | None) -> _Metadata:
        return (*(metadata or ()), *self._channel.token())

    def __call__(self, *args: Any, metadata: _Metadata | None = None, **kwargs: Any) -> Any:
        try:
            reply = self._now()(*args, metadata=self._with_token(metadata), **kwargs)
        except grpc.RpcError as exc:
            self._channel.ended(exc)
            raise
        if isinstance(reply, grpc.Future):  # a stream of replies
            reply.add_done_callback(self._channel.ended)
        return reply

    def future(self, *args: Any, metadata: _Metadata | None = None, **kwargs: Any) -> Any:
        call = self._now().future(*args, metadata=self._with_token(metadata), **kwargs)
        call.add_done_callback(self._channel.ended)
        return call
