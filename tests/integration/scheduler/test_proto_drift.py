"""The committed stubs are what ``make proto`` would write from the committed ``.proto`` files."""

from __future__ import annotations

import runpy
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
STUBS = REPOSITORY / "ams" / "pb" / "v1"
generator = runpy.run_path(str(REPOSITORY / "scripts" / "generate_protos.py"))


def test_the_stubs_are_those_of_the_proto_files(tmp_path: Path) -> None:
    made = generator["generate"](tmp_path)
    drifted = [path.name for path in made if (STUBS / path.name).read_bytes() != path.read_bytes()]
    assert drifted == [], "run 'make proto' and commit ams/pb/v1"


def test_no_stub_is_left_of_a_proto_file_that_is_gone(tmp_path: Path) -> None:
    assert generator["stale"](STUBS, generator["generate"](tmp_path)) == []
