"""What a process wrote beside its successor does not count as the newest of their job."""

from __future__ import annotations

from pathlib import Path

from geartrain.ams.storage.snapshot.folder import latest, list_snapshots, prune
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
