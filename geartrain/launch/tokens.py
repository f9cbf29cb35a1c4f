"""Creation and revocation of the tokens of jobs; :mod:`geartrain.ams.rpc.tokens` describes them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from geartrain.ams.rpc.credentials import names_of
from geartrain.ams.rpc.tokens import PUBLIC_FILE, REVOKED_FILE, RIGHTS, Token, signed
from geartrain.ams.values.config import CLIENT
from geartrain.ams.values.errors import ConfigError
from geartrain.launch.certificates import write_file

TOKEN_KEY = "token.key"


def create_token(
    folder: Path, job: str, allow: Iterable[str], days: float, out: Path | None = None
) -> tuple[Path, str]:
    """Write a token for a job, signed with the folder's key, which the first call makes; return its file and its id.

    ``allow`` holds texts such as ``"faces/*=read,write"``. The file is ``JOB.token`` in the folder, or ``out``. Raises
    ConfigError.
    """
    if not job.isprintable() or job != job.strip() or not 1 <= len(job) <= 200:
        raise ConfigError(
            f"job is {job!r}; it must be a text of 1 to 200 printable characters, in which * stands for any"
        )
    if not (rules := tuple(map(_rule, allow))):
        raise ConfigError("the token gives no rights; say some, as --allow 'faces/*=read,write'")
    _require_programs(folder)
    token = Token(secrets.token_hex(8), job, rules, round(time.time() + days * 86_400, 3))
    path = out or folder / f"{job.replace('/', '.').replace('*', 'any')}.token"
    text = signed(token, _key(folder))
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_file(path, f"{text}\n".encode())
    return path, token.id


def revoke(folder: Path, token_id: str) -> None:
    """Revoke a token for the roles of a folder. Raises ConfigError if ``token_id`` is no id."""
    if len(token_id) != 16 or not set(token_id) <= set("0123456789abcdef"):
        raise ConfigError(f"{token_id!r} is no id of a token; it has 16 of 0-9 and a-f, as 'certs token' printed them")
    path = folder / REVOKED_FILE
    before = path.read_text(encoding="ascii") if path.exists() else ""
    if token_id not in before.split():
        write_file(path, f"{before}{token_id}\n".encode(), mode=0o644)


def _rule(text: str) -> tuple[str, int]:
    pattern, equals, names = text.rpartition("=")
    rights = {name.strip() for name in names.split(",")}
    if not equals or not pattern or not rights <= set(RIGHTS):
        raise ConfigError(
            f"--allow is {text!r}; it must be PATTERN=RIGHT,…, as 'faces/*=read,write', with rights of "
            f"{', '.join(RIGHTS)}"
        )
    return pattern, sum(RIGHTS[name] for name in rights)


def _require_programs(folder: Path) -> None:
    """Raise ConfigError if the certificate of programs has all rights, so that a token would restrict nothing."""
    path = folder / f"{CLIENT}.pem"
    roles = (
        {name.role for name in names_of(x509.load_pem_x509_certificate(path.read_bytes()))}
        if path.exists()
        else {CLIENT}
    )
    if roles != {CLIENT}:
        raise ConfigError(
            f"{path} is good for every role, so no token bounds what a program may do; make a folder of certificates "
            "by role ('geartrain certs init'), and name it in security.folder"
        )


def _key(folder: Path) -> Ed25519PrivateKey:
    """Return the folder's key; make it, and add it to the trusted ones, if there is none."""
    path, trusted = folder / TOKEN_KEY, folder / PUBLIC_FILE
    if path.exists():
        try:
            key = load_pem_private_key(path.read_bytes(), None)
        except (ValueError, TypeError) as exc:
            raise ConfigError(f"{path} is damaged: {exc}; remove it, and another is made") from exc
        if not isinstance(key, Ed25519PrivateKey):
            raise ConfigError(f"{path} is no key of Ed25519; remove it, and another is made")
    else:
        if not folder.is_dir():
            raise ConfigError(f"{folder} does not exist; 'geartrain certs init {folder}' makes it")
        key = Ed25519PrivateKey.generate()
        write_file(path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    others = trusted.read_bytes() if trusted.exists() else b""
    own = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    if own not in others:
        write_file(trusted, others + own, mode=0o644)
    return key
