"""Access tokens of programs, signed by a key of the cluster and verified offline by every role.

A token is ``gt1.PAYLOAD.SIGNATURE`` (base64url): a JSON object ``{"id", "job", "tables": [[pattern, [right, ...]],
...], "until"}`` and the Ed25519 signature of everything before the last dot. It is read from a file, and sent with each
call as ``authorization: Bearer``, under TLS alone. A role with ``token.pub`` in its folder of certificates, one or
several public keys, requires one of every client; ``revoked`` beside it has the ids of revoked tokens. The scheduler
distributes those of its own folder to the other roles.
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from geartrain.ams.kernels import _core
from geartrain.ams.values.config import TOKEN_PREFIX
from geartrain.ams.values.errors import ConfigError
from geartrain.ams.values.scheduler_messages import Revoked

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

logger = logging.getLogger(__name__)

PUBLIC_FILE = "token.pub"
REVOKED_FILE = "revoked"
METADATA_KEY = "authorization"
SCHEME = "Bearer "
RIGHTS = {"read": 1, "write": 2, "create": 4, "snapshot": 8, "admin": 16}
"""Bits of the rights by name; the first two are known to C++, too."""
ALL_TABLES = "*"
_MAX_BYTES = 4096
"""Most bytes of a token: gRPC's limit of metadata is 8 KiB."""
_MAX_VERIFIED = 1024
_POLL_SECONDS = 0.5
_OFFER_SECONDS = 10.0
"""Time within which an offered connection is made, if ever."""
_PUBLIC_KEY = re.compile(rb"-----BEGIN PUBLIC KEY-----.+?-----END PUBLIC KEY-----\n?", re.DOTALL)


class Token(NamedTuple):
    """Rights of a program, with their expiry."""

    id: str
    job: str
    """Job whose streams and steps it may use, a pattern as those of tables."""
    rules: tuple[tuple[str, int], ...]
    """(pattern of tables, in which * stands for any characters; bits of the rights)."""
    until: float
    """Unix time of expiry."""

    def grant(self, until: float = float("inf")) -> _core.Grant:
        """Return the rights for C++, at most until a time. A token with ``admin`` of all tables may act as any job."""
        may_all = any(pattern == ALL_TABLES and rights & RIGHTS["admin"] for pattern, rights in self.rules)
        return _core.Grant(ALL_TABLES if may_all else self.job, list(self.rules), min(self.until, until))


def signed(token: Token, key: Ed25519PrivateKey) -> str:
    """Return the text of a token. Raises ConfigError if it is too long to be sent."""
    names = [[pattern, [name for name, bit in RIGHTS.items() if rights & bit]] for pattern, rights in token.rules]
    said = {"id": token.id, "job": token.job, "tables": names, "until": token.until}
    head = f"{TOKEN_PREFIX}{_encoded(json.dumps(said, separators=(',', ':')).encode())}"
    text = f"{head}.{_encoded(key.sign(head.encode()))}"
    if len(text) > _MAX_BYTES:
        raise ConfigError(f"the token would have {len(text)} bytes, the most is {_MAX_BYTES}; give fewer patterns")
    return text


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _decoded(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)


def verified(text: str, keys: tuple[Ed25519PublicKey, ...]) -> Token | None:
    """Return the token if one of the keys has signed it, else None."""
    from cryptography.exceptions import InvalidSignature

    head, _, signature = text.rpartition(".")
    if len(text) > _MAX_BYTES or not head.startswith(TOKEN_PREFIX):
        return None
    try:
        sign = _decoded(signature)
        for key in keys:
            try:
                key.verify(sign, head.encode())
            except InvalidSignature:
                continue
            said = json.loads(_decoded(head.removeprefix(TOKEN_PREFIX)))
            rules = tuple((str(pattern), sum(RIGHTS[name] for name in set(names))) for pattern, names in said["tables"])
            return Token(str(said["id"]), str(said["job"]), rules, float(said["until"]))
    except (ValueError, KeyError, TypeError, binascii.Error):  # also of a newer version, with an unknown right
        pass
    return None


def public_keys(pem: bytes) -> tuple[Ed25519PublicKey, ...]:
    """Return the keys in ``token.pub``. Raises ValueError if one is not an Ed25519 key, or there is none."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    keys = [load_pem_public_key(found) for found in _PUBLIC_KEY.findall(pem)]
    if not keys or not all(isinstance(key, Ed25519PublicKey) for key in keys):
        raise ValueError("it has no keys, or other keys than those of Ed25519")
    return tuple(keys)  # type: ignore[arg-type]


def others_may_read(found: os.stat_result) -> bool:
    """Return whether a file has any permission for its group or for others.

    Exception: a process that is not root may have a file of root's that its group can read. Kubernetes mounts a Secret
    so, and the process reads it as a member of that group.
    """
    group = 0o040 if found.st_uid == 0 != os.geteuid() else 0
    return bool(found.st_mode & 0o077 & ~group)


class TokenFile:
    """Token of this process, reloaded when its file changes. Thread-safe."""

    def __init__(self, path: str) -> None:
        """Raise ConfigError if there is no file, others can read it, or it holds no token."""
        self._path = Path(path)
        self._look_at = 0.0
        self._stamp: object = None
        self._metadata: tuple[tuple[str, str], ...] = ()
        self.metadata()

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata of a call."""
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + 2 * _POLL_SECONDS
            try:
                stat = self._path.stat()
                if (stamp := (stat.st_ino, stat.st_mtime_ns)) != self._stamp:
                    self._metadata = ((METADATA_KEY, SCHEME + self._read(stat)),)
                    self._stamp = stamp
            except (OSError, ConfigError) as exc:
                if not self._metadata:
                    raise (
                        exc
                        if isinstance(exc, ConfigError)
                        else ConfigError(
                            f"security.token: cannot read {str(self._path)!r}: {exc.strerror}; 'geartrain certs token' "
                            "makes one"
                        )
                    ) from exc
                logger.warning("keeping the present token: %s", exc)
        return self._metadata

    def _read(self, stat: os.stat_result) -> str:
        if others_may_read(stat):
            raise ConfigError(f"{self._path} is open to other users of this machine: chmod 600 {self._path}")
        text = self._path.read_text(encoding="ascii", errors="replace").strip()
        if not text.startswith(TOKEN_PREFIX) or text.count(".") != 2 or len(text) > _MAX_BYTES:
            raise ConfigError(f"{self._path} holds no token; 'geartrain certs token' makes one")
        return text


class _Given(NamedTuple):
    grant: _core.Grant
    is_good: Callable[[], bool]
    caller: dict[str, Any]
    at: float


class Tokens:
    """Tokens that a role accepts, by its folder of certificates. Thread-safe."""

    def __init__(self, folder: str, audit: Callable[..., None]) -> None:
        """``audit`` is called with the refusals of connections for rows."""
        self._folder, self._audit = Path(folder), audit
        self._lock = threading.Lock()
        self._look_at = 0.0
        self._stamp: object = None
        self._keys: tuple[Ed25519PublicKey, ...] | None = None
        """Public keys. None: no tokens are required. Empty: no token is accepted."""
        self._listed: frozenset[str] = frozenset()
        """Ids in the folder's file of revoked tokens, now or earlier."""
        self._told: frozenset[str] = frozenset()
        """Revoked ids received from the scheduler in this process's life."""
        self.heard = ""
        """Digest of the last ones received."""
        self._verified: dict[str, tuple[Token, _core.Grant]] = {}
        self._given: list[_Given] = []
        self._watch: threading.Thread | None = None
        self._reload()

    @property
    def are_wanted(self) -> bool:
        """Whether clients need a token."""
        self._reload()
        return self._keys is not None

    @property
    def revoked(self) -> Revoked:
        """Revoked tokens of the folder."""
        self._reload()
        ids = tuple(sorted(self._listed))
        return Revoked(digest=hashlib.sha256("\n".join(ids).encode()).hexdigest()[:16] if ids else "", ids=ids)

    def add_revoked(self, revoked: Revoked) -> None:
        """Revoke the scheduler's revoked tokens, for good, even if the scheduler or its file is lost later."""
        with self._lock:
            self._told |= set(revoked.ids)
            self.heard = revoked.digest

    def trusted(self, text: str) -> tuple[Token, _core.Grant] | str:
        """Return a token and its rights, or why it is not accepted."""
        self._reload()
        if (known := self._verified.get(text)) is None:
            token = verified(text, self._keys or ())
            if token is None:
                return "no token of this cluster: none of the keys in token.pub has signed it"
            known = token, token.grant()
            with self._lock:
                if len(self._verified) >= _MAX_VERIFIED:
                    self._verified.clear()
                self._verified[text] = known
        if known[0].id in self._listed or known[0].id in self._told:
            return "its token was revoked"
        return "its token ran out" if known[1].is_over else known

    def watch(self, grant: _core.Grant, is_good: Callable[[], bool], caller: dict[str, Any]) -> None:
        """End the rights of a new connection for rows once they are no longer valid."""
        with self._lock:
            self._given.append(_Given(grant, is_good, caller, time.monotonic()))
            if self._watch is None:
                self._watch = threading.Thread(target=self._watch_given, name="geartrain-tokens", daemon=True)
                self._watch.start()

    def _watch_given(self) -> None:
        """End the rights of connections that are no longer valid, and audit their refusals."""
        while True:
            time.sleep(_POLL_SECONDS)
            try:
                self.check_grants()
            except Exception:  # it must go on for the others
                logger.exception("cannot check the rights of row connections; retrying")

    def check_grants(self) -> None:
        with self._lock:
            given = list(self._given)
        for grant, is_good, caller, _ in given:
            if not is_good():
                grant.end()
            refused, count = grant.pop_refused()
            for table, rights in refused:
                names = [name for name, bit in RIGHTS.items() if rights & bit]
                self._audit(caller, "rows", [table], f"no right to {', '.join(names)}", more=count - len(refused))
        before = time.monotonic() - _OFFER_SECONDS
        with self._lock:
            self._given = [one for one in self._given if one.grant.is_in_use or one.at > before]

    def _reload(self) -> None:
        if time.monotonic() < self._look_at:
            return
        with self._lock:
            self._look_at = time.monotonic() + _POLL_SECONDS
            try:
                paths = [self._folder / name for name in (PUBLIC_FILE, REVOKED_FILE)]
                stamp = [_stamp(path) for path in paths]
                if stamp == self._stamp:
                    return
                keys = self._keys if stamp[0] is None else public_keys(paths[0].read_bytes())
                revoked = "" if stamp[1] is None else paths[1].read_text(encoding="ascii")
                if stamp[0] is None and keys is not None:  # a folder may be copied in any order
                    logger.warning("%s was removed: its keys stay valid until this role is restarted", paths[0])
            except (OSError, ValueError) as exc:
                logger.warning("cannot read the keys of tokens in %s, keeping the present ones: %s", self._folder, exc)
                if self._keys is None:
                    self._keys = ()  # tokens are required, though the keys are unreadable
                return
            self._stamp, self._keys, self._listed = stamp, keys, self._listed.union(revoked.split())
            self._verified.clear()


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return stat.st_ino, stat.st_mtime_ns


@functools.cache
def token_file(path: str) -> TokenFile:
    """Return this process's token file at a path."""
    return TokenFile(path)
