"""Generate the Python stubs of ``proto/`` into a folder, by default ``ams/pb/v1`` (what ``make proto`` does).

The generated files are committed, so that users need no compiler; a test compares them with a fresh generation.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
SOURCES = REPOSITORY / "proto"
PACKAGE = Path("geartrain/ams/pb/v1")
STUBS = REPOSITORY / "ams" / "pb" / "v1"


def generate(target: Path) -> list[Path]:
    """Write the stubs of every ``.proto`` into ``target`` and return their paths, sorted."""
    from grpc_tools import protoc  # a development tool: imported only where it is used

    protos = sorted((SOURCES / PACKAGE).glob("*.proto"))
    if not protos:
        raise SystemExit(f"no .proto files under {SOURCES / PACKAGE}")
    well_known = Path(protoc.__file__).parent / "_proto"
    plugins = Path(sys.executable).parent
    with tempfile.TemporaryDirectory() as folder:
        arguments = [
            "protoc",
            f"--proto_path={SOURCES}",
            f"--proto_path={well_known}",
            f"--plugin=protoc-gen-mypy={plugins / 'protoc-gen-mypy'}",
            f"--python_out={folder}",
            f"--mypy_out={folder}",
            *map(str, protos),
        ]
        if protoc.main(arguments) != 0:
            raise SystemExit("protoc failed; its complaint is above")
        target.mkdir(parents=True, exist_ok=True)
        made = sorted((Path(folder) / PACKAGE).iterdir())
        return [Path(shutil.copyfile(path, target / path.name)) for path in made]


def stale(target: Path, made: list[Path]) -> list[Path]:
    """Return the stubs in ``target`` that no ``.proto`` stands behind any more."""
    names = {path.name for path in made}
    return sorted(p for p in target.iterdir() if "_pb2" in p.name and p.name not in names)


def main() -> None:
    """Regenerate, and remove what is stale."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=STUBS, help="folder for the stubs (default: ams/pb/v1)")
    target = parser.parse_args().out
    made = generate(target)
    for path in stale(target, made):
        path.unlink()
    print(f"{len(made)} files in {target}")


if __name__ == "__main__":
    main()
