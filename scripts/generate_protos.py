"""Generate the Python stubs of ``proto/`` into ``ams/pb/v1`` and ``serving/kserve/pb`` (what ``make proto`` does).

The generated files are committed, so that users need no compiler; a test compares them with a fresh generation.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import xxhash

REPOSITORY = Path(__file__).resolve().parent.parent
SOURCES = REPOSITORY / "proto"
PACKAGES = ("ams/pb/v1", "serving/kserve/pb")
"""Folders of ``.proto`` files below ``proto/geartrain``, and of their stubs in the tree."""
POOL = {"serving/kserve/pb": ("_descriptor_pool.Default()", "_descriptor_pool.DescriptorPool()")}
"""What of a generated file is written otherwise: a foreign protocol has a pool of its own, for another package in the
process, such as its usual client, may bring the same messages."""

WIRE = '''"""The version of the wire, made by 'make proto': a hash of all messages and of the version of frames."""

WIRE = "{}"
'''


def generate(target: Path, package: str = PACKAGES[0]) -> list[Path]:
    """Write the stubs of every ``.proto`` of a package into ``target`` and return their paths, sorted."""
    from grpc_tools import protoc  # a development tool: imported only where it is used

    protos = sorted((SOURCES / "geartrain" / package).glob("*.proto"))
    if not protos:
        raise SystemExit(f"no .proto files under {SOURCES / 'geartrain' / package}")
    well_known = Path(protoc.__file__).parent / "_proto"
    plugins = Path(sys.executable).parent
    with tempfile.TemporaryDirectory() as folder:
        # In a process of its own: it forks, and aborts where other libraries have brought another protobuf.
        command = [
            *(sys.executable, "-m", "grpc_tools.protoc"),
            f"--proto_path={SOURCES}",
            f"--proto_path={well_known}",
            f"--plugin=protoc-gen-mypy={plugins / 'protoc-gen-mypy'}",
            f"--python_out={folder}",
            f"--mypy_out={folder}",
            f"--descriptor_set_out={folder}/descriptors",
            *map(str, protos),
        ]
        if subprocess.run(command, check=False).returncode != 0:
            raise SystemExit("protoc failed; its complaint is above")
        target.mkdir(parents=True, exist_ok=True)
        if package == PACKAGES[0]:
            digest = xxhash.xxh3_64(Path(folder, "descriptors").read_bytes() + _frame_version()).hexdigest()
            Path(folder, "geartrain", package, "wire.py").write_text(WIRE.format(digest[:8]), encoding="utf-8")
        made = sorted((Path(folder) / "geartrain" / package).iterdir())
        for path in made if package in POOL else ():
            path.write_text(path.read_text(encoding="utf-8").replace(*POOL[package]), encoding="utf-8")
        return [Path(shutil.copyfile(path, target / path.name)) for path in made]


def _frame_version() -> bytes:
    header = (REPOSITORY / "ams/kernels/csrc/frames/frame.hpp").read_bytes()
    (found,) = re.findall(rb"kFrameVersion = (\d+);", header)
    return bytes(found)


def stale(target: Path, made: list[Path]) -> list[Path]:
    """Return the stubs in ``target`` that no ``.proto`` stands behind any more."""
    names = {path.name for path in made}
    return sorted(p for p in target.iterdir() if "_pb2" in p.name and p.name not in names)


def main() -> None:
    """Regenerate, and remove what is stale."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=REPOSITORY, help="folder with the folders of stubs")
    out = parser.parse_args().out
    for package in PACKAGES:
        target = out / package
        made = generate(target, package)
        for path in stale(target, made):
            path.unlink()
        print(f"{len(made)} files in {target}")


if __name__ == "__main__":
    main()
