"""``geartrain certs``: certificates and tokens for the processes of a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from geartrain.ams.values.config import CERTIFIED_ROLES

app = typer.Typer(
    no_args_is_help=True, help="Make, issue and renew the certificates and tokens of a cluster (security.folder)."
)

Folder = Annotated[Path, typer.Argument(help="Folder of certificates.", show_default=False)]
Days = Annotated[float, typer.Option(min=1e-5, max=3650, help="How long a certificate is good.")]
Authority = Annotated[
    Path | None, typer.Option("--ca", help="Folder with the key of the authority (ca.key).", show_default="FOLDER")
]


@app.command()
def init(
    folder: Folder,
    cluster: Annotated[str, typer.Option(help="Name of the cluster, in every certificate.")] = "geartrain",
    days: Days = 30.0,
) -> None:
    """Make a private certificate authority, and a certificate of every role.

    The authority's key stays in this folder. 'certs issue' makes the folder of each other machine.
    """
    from geartrain.launch.certificates import create_authority, issue

    create_authority(folder, cluster)
    for role in CERTIFIED_ROLES:
        issue(folder, folder, [role], days=days)
    print(f"{folder}: certificates of {', '.join(CERTIFIED_ROLES)}, good for {days:g} days")


@app.command(name="issue")
def issue_(
    folder: Folder,
    roles: Annotated[
        str,
        typer.Argument(
            help=f"Of {', '.join(CERTIFIED_ROLES)}, with commas between.", metavar="ROLES", show_default=False
        ),
    ],
    shards: Annotated[
        str | None, typer.Option(help="Of a server, as 0-3 or 0,2: it may be no other shard.", show_default="any")
    ] = None,
    authority: Authority = None,
    days: Days = 30.0,
) -> None:
    """Issue the folder of one machine or container: ca.pem, the key and certificate (ROLE.pem) of each role there, and
    token.pub and revoked for roles other than client. The authority's key is not in it.

    Files that the folder already has stay; its trusted authorities become those of the authority's folder, too.
    """
    from geartrain.ams.values.config import MAX_SHARDS, numbers_of
    from geartrain.ams.values.errors import ConfigError
    from geartrain.launch.certificates import issue

    numbers = numbers_of(shards, "--shards", "shards", MAX_SHARDS) if shards is not None else ()
    wanted = [role.strip() for role in roles.split(",")]
    if numbers and "server" not in wanted:
        raise ConfigError(f"--shards is {shards!r}, and only a server has shards; leave it out for a {roles}")
    if unknown := [role for role in wanted if role not in CERTIFIED_ROLES]:
        raise ConfigError(f"role is {unknown[0]!r}; it must be one of {', '.join(CERTIFIED_ROLES)}")
    for role in wanted:
        print(issue(authority or folder, folder, [role], numbers, days))


@app.command(name="renew")
def renew_(
    folders: Annotated[list[Path], typer.Argument(help="Folders of certificates.", show_default=False)],
    authority: Authority = None,
    days: Annotated[
        float | None, typer.Option(min=1e-5, max=3650, help="How long they are good.", show_default="as before")
    ] = None,
    all_of_them: Annotated[bool, typer.Option("--all", help="Also those that are good for long.")] = False,
) -> None:
    """Renew certificates that have less than a third of their time left, and update ca.pem, token.pub and revoked.

    Running processes load the new files by themselves.
    """
    from geartrain.launch.certificates import renew

    for folder in folders:
        for path, what in renew(authority or folder, folder, days, all_of_them=all_of_them).items():
            print(f"{path}: {what}")


@app.command()
def token(
    job: Annotated[
        str, typer.Argument(help="Job that it is for; * in it stands for any characters.", show_default=False)
    ],
    folder: Folder,
    allow: Annotated[
        list[str],
        typer.Option(
            help="PATTERN=RIGHT,... of tables, as 'faces/*=read,write'; rights: read, write, create, snapshot, admin. "
            "Can be repeated: rights add up.",
            show_default=False,
        ),
    ],
    days: Annotated[float, typer.Option(min=1e-5, max=3650, help="How long it is good.")] = 7.0,
    out: Annotated[Path | None, typer.Option(help="File to write.", show_default="FOLDER/JOB.token")] = None,
) -> None:
    """Write the token of a job: its rights on tables. The job's programs name the file in security.token.

    The first token makes token.key, which stays where you issue, and token.pub: a role with token.pub in its folder
    then requires a token of every client.
    """
    from geartrain.launch.tokens import create_token

    path, token_id = create_token(folder, job, allow, days, out)
    print(f"{path}: token {token_id} of {job}, good for {days:g} days")


@app.command(name="revoke")
def revoke_(
    token_id: Annotated[str, typer.Argument(metavar="ID", help="As 'certs token' printed it.", show_default=False)],
    folder: Folder,
) -> None:
    """Revoke a token: its calls and connections end within seconds, on all roles if this is the scheduler's folder."""
    from geartrain.launch.tokens import revoke

    revoke(folder, token_id)
    print(f"{folder / 'revoked'}: {token_id}")


Passphrase = Annotated[
    Path | None, typer.Option("--passphrase-file", help="File with the passphrase.", show_default="asked for")
]


@app.command()
def backup(
    folder: Folder,
    file: Annotated[Path, typer.Argument(help="File to write.", show_default=False)],
    passphrase_file: Passphrase = None,
) -> None:
    """Back up the authority's key (ca.key) to an encrypted file (PKCS #12) that the passphrase opens."""
    from geartrain.launch.certificates import back_up_authority

    back_up_authority(folder, file, _passphrase(passphrase_file, again=True))
    print(f"{file}: the key of the authority in {folder}, encrypted")


@app.command()
def restore(
    file: Annotated[Path, typer.Argument(help="What 'certs backup' wrote.", show_default=False)],
    folder: Folder,
    passphrase_file: Passphrase = None,
) -> None:
    """Restore an authority's key from its backup into this folder, to issue and renew with it."""
    from geartrain.launch.certificates import restore_authority

    restore_authority(file, folder, _passphrase(passphrase_file, again=False))
    print(f"{folder / 'ca.key'}: restored")


def _passphrase(file: Path | None, *, again: bool) -> str:
    from geartrain.ams.values.errors import ConfigError

    if file is None:
        return str(typer.prompt("Passphrase", hide_input=True, confirmation_prompt=again, err=True))
    try:
        return file.read_text().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as exc:
        why = getattr(exc, "strerror", None) or exc
        raise ConfigError(
            f"cannot read the passphrase in {file} ({why}); give a file of text that you may read"
        ) from exc
