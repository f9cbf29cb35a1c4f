"""Generator of the ``security.folder`` files: a private authority, and certificates of the roles under it."""

from __future__ import annotations

import datetime
import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
    pkcs12,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from geartrain.ams.rpc.credentials import ANY_NUMBER, CA_FILE, SCHEME, Name, host_of, names_of
from geartrain.ams.rpc.tokens import PUBLIC_FILE, REVOKED_FILE
from geartrain.ams.values.config import CERTIFIED_ROLES, CLIENT, is_identified, private_folder
from geartrain.ams.values.errors import ConfigError

CA_KEY = "ca.key"
_AUTHORITY_DAYS = 3650.0
_SHORTEST_PASSPHRASE = 12
_KDF_ROUNDS = 600_000
"""PBKDF2 rounds with SHA-256: a guess of a passphrase costs some 0.2 s of a core."""
_CLOCKS_DIFFER = datetime.timedelta(minutes=10)
"""Time before its issue from which a certificate is valid, for clocks that differ."""
_RENEW_SHARE = 1 / 3
"""Share of its lifetime below which a certificate is renewed."""


def create_authority(folder: Path, cluster: str) -> None:
    """Make a folder with an authority of its own. Raises ConfigError if it has one, or if ``cluster`` is no valid
    name."""
    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?", cluster):
        raise ConfigError(f"cluster is {cluster!r}; it must be of a-z, 0-9 and -, at most 42 of them, as 'search-2'")
    if taken := [path for path in (folder / CA_FILE, folder / CA_KEY) if path.exists()]:
        raise ConfigError(
            f"{taken[0]} is there already, and what it issued is in use; give another folder, or renew what runs out: "
            f"'geartrain certs renew {folder}'"
        )
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    key = ec.generate_private_key(ec.SECP256R1())
    name = _named(f"{cluster} authority")
    builder = (
        _builder(name, name, key.public_key(), _AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(authority=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.SubjectAlternativeName([x509.UniformResourceIdentifier(f"{SCHEME}{cluster}/ca/0")]), critical=False
        )
    )
    write_file(folder / CA_KEY, _private(key))
    write_file(folder / CA_FILE, builder.sign(key, SHA256()).public_bytes(Encoding.PEM), mode=0o644)


def back_up_authority(folder: Path, backup: Path, passphrase: str) -> None:
    """Write key and certificate of a folder's authority to an encrypted file (PKCS #12, AES-256), which the passphrase
    opens. Raises ConfigError: no authority, a short passphrase, or the file exists.
    """
    if len(passphrase) < _SHORTEST_PASSPHRASE:
        raise ConfigError(
            f"the passphrase has {len(passphrase)} characters; it must have at least {_SHORTEST_PASSPHRASE}: whoever "
            "guesses it can act as any role of the cluster"
        )
    (ca, *_), key = _authority(folder)
    if backup.exists():
        raise ConfigError(f"{backup} is there already; give another file, or remove it")
    encryption = (
        PrivateFormat.PKCS12.encryption_builder()
        .kdf_rounds(_KDF_ROUNDS)
        .key_cert_algorithm(pkcs12.PBES.PBESv2SHA256AndAES256CBC)
        .hmac_hash(SHA256())
        .build(passphrase.encode())
    )
    backup.parent.mkdir(parents=True, exist_ok=True)
    write_file(backup, pkcs12.serialize_key_and_certificates(b"geartrain", key, ca, None, encryption))


def restore_authority(backup: Path, folder: Path, passphrase: str) -> None:
    """Write ``ca.key`` of a backup into a folder, and add its certificate to the trusted ones there.

    Raises ConfigError: a wrong passphrase, a damaged or absent file, or the folder has a key already.
    """
    path = folder / CA_KEY
    if path.exists():
        raise ConfigError(f"{path} is there already; give another folder, or remove it")
    try:
        key, ca, _ = pkcs12.load_key_and_certificates(backup.read_bytes(), passphrase.encode())
    except OSError as exc:
        raise ConfigError(f"cannot read {backup}: {exc.strerror or exc}") from exc
    except ValueError as exc:
        raise ConfigError(f"{backup} is no backup, is damaged, or has another passphrase: {exc}") from exc
    if ca is None or not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{backup} has no key and certificate of an authority; 'geartrain certs backup' makes one")
    _believe(folder, [ca])
    write_file(path, _private(key))


def issue(authority: Path, folder: Path, roles: Iterable[str], numbers: Iterable[int] = (), days: float = 30.0) -> Path:
    """Write ``ROLE.pem`` (named by the first of ``roles``): key and certificate of a process with all these roles.

    ``numbers`` are the shards that a server may hold; none: any. ``_hand_over`` adds the files by which the folder
    trusts others. Raises ConfigError: no such role, no authority's key in the folder ``authority``, or the folder is
    of another cluster.
    """
    roles = tuple(roles)
    if unknown := [role for role in roles if role not in CERTIFIED_ROLES]:
        raise ConfigError(f"role is {unknown[0]!r}; it must be one of {', '.join(CERTIFIED_ROLES)}")
    (ca, *_), ca_key = _authority(authority)
    (of,) = names_of(ca)
    shards = [str(number) for number in numbers] or [ANY_NUMBER]
    names = [Name(of.cluster, role, n) for role in roles for n in (shards if role == "server" else ["0"])]
    uris = [x509.UniformResourceIdentifier(f"{SCHEME}{name.cluster}/{name}") for name in names]
    serving = [role for role in roles if role != CLIENT]
    # Nobody connects to a client, except to scrape a worker's counters.
    hosts = [host_of(of.cluster, role) for role in ([*roles, None] if serving else roles)]
    # *.server.CLUSTER: any shard. Last, as gRPC reports an error on such a name when it looks for CLUSTER.geartrain.
    hosts += [host_of(*name) for name in names if name.role == "server"]
    uses = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        _builder(_named(str(names[0])), ca.subject, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(authority=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(x509.SubjectAlternativeName([*uris, *map(x509.DNSName, hosts)]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, SHA256())
    )
    path = folder / f"{roles[0]}.pem"
    _hand_over(authority, folder, serving=bool(serving))
    write_file(path, _private(key) + certificate.public_bytes(Encoding.PEM))
    return path


def renew(authority: Path, folder: Path, days: float | None = None, *, all_of_them: bool = False) -> dict[Path, str]:
    """Renew certificates with less than a third of their time left, with new keys, for ``days`` or as long as before.

    Returns the outcome for each certificate, in words. Raises ConfigError.
    """
    told = {}
    now = datetime.datetime.now(datetime.UTC)
    paths = sorted(path for role in CERTIFIED_ROLES if (path := folder / f"{role}.pem").exists())
    if not paths:
        raise ConfigError(f"{folder} has no certificates; 'geartrain certs issue {folder} ROLE --ca ...' makes them")
    _hand_over(authority, folder, serving=any(path.stem != CLIENT for path in paths))
    for path in paths:
        try:
            old = x509.load_pem_x509_certificate(path.read_bytes())
        except ValueError as exc:
            raise ConfigError(f"{path} is damaged ({exc}); issue it again ('geartrain certs issue')") from exc
        until = old.not_valid_after_utc
        life = until - old.not_valid_before_utc - _CLOCKS_DIFFER
        if not all_of_them and until - now > life * _RENEW_SHARE:
            told[path] = f"good until {until:%Y-%m-%d %H:%M} UTC"
            continue
        names = names_of(old)
        roles = sorted({name.role for name in names}, key=lambda role: role != path.stem)
        numbers = [int(name.number) for name in names if name.role == "server" and name.number != ANY_NUMBER]
        issue(authority, folder, roles, numbers, days or life.total_seconds() / 86_400)
        told[path] = "renewed"
    return told


def create_private_folder() -> None:
    """Make the certificate of this user's clusters on this machine, unless this process has one set, or "none".

    Its authority is stored beside it, so that it can always be renewed. Raises ConfigError if it cannot be written.
    """
    folder = private_folder()
    if is_identified() or folder.is_dir():
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as whole:
            made = Path(whole) / folder.name
            create_authority(made, "private")
            issue(made, made, [CLIENT, *CERTIFIED_ROLES[:-1]], days=_AUTHORITY_DAYS - 1)
            made.rename(folder)  # complete, unless another process was faster
    except OSError as exc:
        if not folder.is_dir():
            raise ConfigError(
                f"cannot make certificates in {folder}: {exc.strerror or exc}; set security.folder to another folder "
                "(geartrain certs init), or serve every user of this machine (--insecure)"
            ) from exc


def _hand_over(authority: Path, folder: Path, *, serving: bool) -> None:
    """Make a folder trust the authorities that the authority's folder trusts; if ``serving``, its tokens, too."""
    _believe(folder, _authority(authority)[0])
    if not serving or folder.resolve() == authority.resolve():
        return
    if (keys := authority / PUBLIC_FILE).exists():
        write_file(folder / PUBLIC_FILE, keys.read_bytes(), mode=0o644)
    if (new := authority / REVOKED_FILE).exists():
        old = folder / REVOKED_FILE
        ids = {
            *new.read_text(encoding="ascii").split(),
            *(old.read_text(encoding="ascii").split() if old.exists() else ()),
        }
        write_file(old, "".join(f"{found}\n" for found in sorted(ids)).encode(), mode=0o644)


def _authority(folder: Path) -> tuple[list[x509.Certificate], ec.EllipticCurvePrivateKey]:
    """Return the certificates that a folder trusts, that of its own key first, and the key. Raises ConfigError."""
    try:
        key = load_pem_private_key((folder / CA_KEY).read_bytes(), None)
        certificates = x509.load_pem_x509_certificates((folder / CA_FILE).read_bytes())
    except FileNotFoundError as exc:
        raise ConfigError(
            f"{exc.filename} does not exist: no authority issues certificates here; 'geartrain certs init {folder}' "
            "makes one, or name the folder of the one that there is (--ca)"
        ) from exc
    except (ValueError, TypeError) as exc:
        raise ConfigError(f"{folder / CA_KEY} or {folder / CA_FILE} is damaged: {exc}") from exc
    certificates.sort(key=lambda found: found.public_key() != key.public_key())
    if certificates[0].public_key() != key.public_key() or not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(
            f"{folder / CA_KEY} is not the key of a certificate in {folder / CA_FILE}; bring both back from one copy"
        )
    return certificates, key


def _believe(folder: Path, authorities: list[x509.Certificate]) -> None:
    """Add authorities to the trusted ones of a folder. Raises ConfigError if those are of another cluster."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / CA_FILE
    before = trusted = path.read_bytes() if path.exists() else b""
    of = {name.cluster for ca in authorities for name in names_of(ca)}
    for other in x509.load_pem_x509_certificates(before) if before else ():
        if foreign := {name.cluster for name in names_of(other)} - of:
            raise ConfigError(
                f"{path} trusts cluster {min(foreign)!r}, and the authority is of cluster {min(of)!r}, which nobody "
                f"there trusts; make one of that name ('geartrain certs init --cluster {min(foreign)}')"
            )
    for ca in authorities:
        if (own := ca.public_bytes(Encoding.PEM)) not in trusted:
            trusted += own
    if trusted != before:
        write_file(path, trusted, mode=0o644)


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"geartrain {name}")])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: float
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCKS_DIFFER)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def write_file(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Replace a file atomically: readers see the old or the new content, and other users never see a key."""
    handle, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(handle, "wb") as file:
        os.fchmod(handle, mode)
        file.write(content)
        file.flush()
        os.fsync(handle)
    Path(part).replace(path)
