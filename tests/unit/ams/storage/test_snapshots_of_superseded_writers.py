"""What a process wrote beside its successor does not count as the newest of their job."""

from __future__ import annotations

import json
from pathlib import Path

import xxhash

from geartrain.ams.storage.snapshot.folder import latest, list_snapshots, open_snapshot, prune
from geartrain.ams.storage.snapshot.manifest import Writer
from tests.unit.ams.storage.conftest import Take


def by(incarnation: int, stream: str = "job/rank0") -> Writer:
    return Writer(stream=stream, incarnation=incarnation)


def names(root: Path) -> list[str]:
    return [listed.name for listed in list_snapshots(root)]


def test_one_that_was_committed_after_its_successor_began_is_not_the_newest(tmp_path: Path, take: Take) -> None:
    take(tmp_path, "a", step=10, created=1.0, writer=by(1))
    take(tmp_path, "b", step=11, created=2.0, writer=by(2))
    take(tmp_path, "late", step=20, created=3.0, writer=by(1))
    assert names(tmp_path) == ["b", "a", "late"]
    assert latest(tmp_path).name == "b"
    assert prune(tmp_path, 2) == ["late"]


def test_one_that_the_job_went_back_behind_is_not_the_newest(tmp_path: Path, take: Take) -> None:
    take(tmp_path, "a", step=10, created=1.0, writer=by(1))
    take(tmp_path, "beyond", step=30, created=2.0, writer=by(1))
    take(tmp_path, "again", step=20, created=3.0, writer=by(2))
    assert names(tmp_path) == ["again", "a", "beyond"]


def test_those_of_other_streams_and_of_nobody_are_sorted_by_step(tmp_path: Path, take: Take) -> None:
    take(tmp_path, "a", step=30, writer=by(1))
    take(tmp_path, "b", step=20, writer=by(2, "another/rank0"))
    take(tmp_path, "c", step=25)
    assert names(tmp_path) == ["a", "c", "b"]


def test_a_manifest_of_an_earlier_format_is_readable(tmp_path: Path, take: Take) -> None:
    path = take(tmp_path, "a", step=30)
    manifest = path / "manifest.json"
    content = json.loads(manifest.read_bytes())
    for unknown in ("xxh3_128", "writer"):
        del content[unknown]
    content["format"] = 2
    text = json.dumps(content, sort_keys=True, ensure_ascii=False, allow_nan=False)
    content["xxh3_128"] = xxhash.xxh3_128_hexdigest(text.encode())
    manifest.write_text(json.dumps(content, sort_keys=True, ensure_ascii=False, allow_nan=False, indent=1) + "\n")
    assert open_snapshot(path).manifest.writer is None
    assert open_snapshot(path).verify() == []
