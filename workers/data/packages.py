"""Data inside pip and npm packages: downloaded by name and version, read from the archive, never installed."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from geartrain.ams.values.errors import ConfigError
from geartrain.workers.atomic import replacing

Say = Callable[[str], None]


def pinned_requirements(text: str) -> Mapping[str, str]:
    """Return the whole line of a requirements file by package name."""
    lines = (line.strip() for line in text.splitlines())
    return {re.split(r"[=<>~! ]", line, maxsplit=1)[0]: line for line in lines if line and not line.startswith("#")}


def download_packages(names: Sequence[str], requirements: Path, folder: Path, say: Say) -> bool:
    """Download the archives of ``names``, pinned in ``requirements``, to ``folder`` with pip; return whether it
    succeeded.

    pip reads the environment's ``PIP_ARGS``. Its error messages go to ``say``.
    """
    pinned = pinned_requirements(requirements.read_text(encoding="utf-8"))
    wanted = folder / "wanted.txt"
    wanted.write_text("\n".join(pinned[name] for name in names) + "\n", encoding="utf-8")
    command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--require-hashes", "--dest", str(folder), "--requirement", str(wanted)]
    command += shlex.split(os.environ.get("PIP_ARGS", ""))
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wanted.unlink()
    if result.returncode != 0:
        lines = [line for line in result.stderr.splitlines() if line.startswith("ERROR")] or [result.stderr.strip()]
        say(f"pip could not download {', '.join(names)}: {lines[-1]}")
    return result.returncode == 0


def download_npm_package(package: str, folder: Path, say: Say) -> Path | None:
    """Download the archive of ``package`` (name@version) to ``folder`` with npm; return it, None on failure.

    npm's error messages go to ``say``. No script of the package is run.
    """
    npm = shutil.which("npm")
    if npm is None:
        say("there is no npm, which fetches it: install Node.js")
        return None
    command = [npm, "pack", package, "--pack-destination", str(folder), "--json", "--ignore-scripts"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    archives = sorted(folder.glob("*.tgz"))
    if result.returncode != 0 or not archives:
        lines = [line for line in result.stderr.splitlines() if "error" in line.lower()] or [result.stderr.strip()]
        say(f"npm could not download {package}: {lines[0]}")
        return None
    return archives[-1]


def member_of(archive: Path, ending: str) -> bytes | None:
    """Return the content of the first file in a wheel, sdist or npm package whose path has this ending."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return next((wheel.read(name) for name in wheel.namelist() if name.endswith(ending)), None)
    if archive.name.endswith((".tar.gz", ".tgz")):
        with tarfile.open(archive) as sdist:
            for member in sdist:
                file = sdist.extractfile(member) if member.isfile() and member.name.endswith(ending) else None
                if file is not None:
                    return file.read()
    return None


def require_pinned(where: object, content: bytes, sha256: str) -> None:
    """Raise ConfigError, with the remedy, unless ``content``, found at ``where``, has the pinned hash."""
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise ConfigError(
            f"{where} has SHA-256 {found}, but it is pinned to {sha256}: the file was damaged or replaced. Remove it "
            "and run again; does PIP_ARGS point at another index?"
        )


def write_pinned(path: Path, content: bytes, sha256: str) -> None:
    """Write the pinned ``content`` atomically. Raises ConfigError for any other."""
    require_pinned(path, content, sha256)
    with replacing(path) as temporary:
        temporary.write_bytes(content)
