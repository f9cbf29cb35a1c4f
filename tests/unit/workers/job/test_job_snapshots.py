"""What a job makes of snapshots that fail, without a cluster."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from geartrain.ams.client.snapshots.snapshot import PendingSnapshot
from geartrain.ams.values.errors import SnapshotFailed
from geartrain.workers.job import snapshots as job_snapshots
from geartrain.workers.job.snapshots import JobSnapshots
from geartrain.workers.job.state import JobProgress


def test_a_snapshot_is_whole_although_the_old_ones_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise SnapshotFailed("the folder is read-only")

    def snapshot(*_: Any, **__: Any) -> PendingSnapshot:
        work: Future[Any] = Future()
        work.set_result(tmp_path)
        return PendingSnapshot(tmp_path, work)

    monkeypatch.setattr(job_snapshots, "prune", refuse)
    told: list[str] = []
    progress = JobProgress(step=5, stage_start=0, stage_steps=10, table="job")
    state: Any = SimpleNamespace(progress=progress, values=dict, files=dict)
    rows: Any = SimpleNamespace(start_snapshot=snapshot)
    snapshots = JobSnapshots(rows, str(tmp_path), keep=2, say=told.append)
    snapshots.require(state)
    assert snapshots.last is not None and snapshots.last.progress == progress
    snapshots.start(state)
    snapshots.wait()
    assert told == ["Old snapshots stay for now: the folder is read-only"] * 2


@pytest.mark.parametrize(("every_seconds", "due"), [(60.0, [False, True]), (None, [False, False])])
def test_a_snapshot_is_due_so_long_after_the_last_one_was_begun(
    tmp_path: Path, every_seconds: float | None, due: list[bool]
) -> None:
    now = [100.0]
    rows: Any = SimpleNamespace()
    snapshots = JobSnapshots(
        rows, str(tmp_path), keep=2, every_seconds=every_seconds, say=lambda _: None, clock=lambda: now[0]
    )
    found = []
    for now[0] in (159.0, 160.0):
        found.append(snapshots.is_due)
    assert found == due


def test_a_wait_for_a_snapshot_calls_again_and_again(tmp_path: Path) -> None:
    work: Future[Any] = Future()
    kept: list[float | None] = []

    def result(timeout_seconds: float | None = None) -> Any:
        if not work.done():
            assert len(kept) < 3
            kept.append(timeout_seconds)
            raise TimeoutError
        return work.result()

    def on_wait() -> None:
        if len(kept) == 3:
            work.set_result(tmp_path)

    progress = JobProgress(step=5, stage_start=0, stage_steps=10, table="job")
    state: Any = SimpleNamespace(progress=progress, values=dict, files=dict)
    pending = SimpleNamespace(done=work.done, result=result)
    rows: Any = SimpleNamespace(start_snapshot=lambda *_, **__: pending)
    snapshots = JobSnapshots(rows, str(tmp_path), keep=2, say=lambda _: None, on_wait=on_wait)
    snapshots.require(state)
    assert kept == [1.0] * 3 and snapshots.last is not None
