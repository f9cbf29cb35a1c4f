"""The committed stubs are what ``make proto`` would write from the committed ``.proto`` files."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
generator = runpy.run_path(str(REPOSITORY / "scripts" / "generate_protos.py"))


@pytest.mark.parametrize("package", generator["PACKAGES"])
def test_the_stubs_are_those_of_the_proto_files(package: str, tmp_path: Path) -> None:
    stubs = REPOSITORY / package
    made = generator["generate"](tmp_path, package)
    drifted = [path.name for path in made if (stubs / path.name).read_bytes() != path.read_bytes()]
    assert drifted == [], f"run 'make proto' and commit {package}"
    assert generator["stale"](stubs, made) == [], "stubs of a .proto file that is gone"
