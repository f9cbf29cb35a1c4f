"""The snapshots of a job: taken when they are due, and a disk or a byte that fails never ends the training unasked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from geartrain.ams.observe import failpoints
from geartrain.ams.storage.snapshot.folder import latest, list_snapshots
from geartrain.ams.values.errors import ConfigError, SnapshotDamaged, SnapshotFailed
from geartrain.workers.job.folder import sole_trainer
from geartrain.workers.job.options import SnapshotSettings
from tests.faults.test_job_recovery import JOB, images, train
from tests.integration.jobs.test_classify_and_predict import assert_same_state, one_thread

__all__ = ["images", "one_thread"]


def test_a_full_disk_costs_a_snapshot_and_not_the_training(images: Path, tmp_path: Path) -> None:
    with failpoints.armed("manifest.write.before=error(ENOSPC)@3"):  # of step 10: after those of 0 and 5
        result, told = train(tmp_path / "run", images, replace(JOB, snapshots=SnapshotSettings(steps=5, keep=9)))
    assert result.finished
    assert "No snapshot of step 10, training goes on: " in told
    assert "Free space on that disk" in told
    steps = [int(listed.name.split("-")[1]) for listed in list_snapshots(tmp_path / "run" / "snapshots")]
    assert steps == [24, 20, 15, 5, 0]


def test_a_job_does_not_begin_where_it_cannot_be_saved(images: Path, tmp_path: Path) -> None:
    with (
        failpoints.armed("block.write.before=error(ENOSPC)"),
        pytest.raises(SnapshotFailed, match=r"Free space on that disk.* this worker see alike \(--snapshots\)"),
    ):
        train(tmp_path / "run", images)


def test_snapshots_come_by_the_clock_too_and_old_ones_go(images: Path, tmp_path: Path) -> None:
    often = SnapshotSettings(steps=5, minutes=1e-9, keep=3)
    train(tmp_path / "run", images, replace(JOB, snapshots=often))
    names = [listed.name for listed in list_snapshots(tmp_path / "run" / "snapshots")]
    assert names == [f"step-{step:09}" for step in (24, 23, 22)]


def test_a_damaged_snapshot_is_passed_over_only_when_asked(images: Path, tmp_path: Path) -> None:
    straight, damaged = tmp_path / "straight", tmp_path / "damaged"
    for out in (straight, damaged):
        train(out, images)
    train(straight, None, resume=True, resume_steps=4)
    newest = latest(damaged / "snapshots")
    block = next(Path(newest.path) / entry.path for entry in newest.manifest.files if entry.kind == "rows")
    data = bytearray(block.read_bytes())
    data[-3] ^= 1
    block.write_bytes(data)
    with pytest.raises(SnapshotDamaged, match=block.name):
        train(damaged, None, resume=True, resume_steps=4)
    _, told = train(damaged, None, resume=True, allow_fallback=True)
    assert "Going on at step 20" in told  # and to the end of its stage
    _, told = train(damaged, None, resume=True, resume_steps=4)
    assert "Going on at step 24" in told  # of the new snapshot of that step
    assert_same_state(straight, damaged)


def test_a_place_with_snapshots_of_another_job_is_left_alone(images: Path, tmp_path: Path) -> None:
    place = tmp_path / "place"
    train(tmp_path / "first", images, snapshots=str(place))
    before = sorted(place.rglob("*"))
    with pytest.raises(ConfigError, match="already holds snapshots"):
        train(tmp_path / "second", images, snapshots=str(place))
    assert sorted(place.rglob("*")) == before
    train(tmp_path / "first", None, resume=True, resume_steps=2)


def test_a_run_folder_has_one_trainer(images: Path, tmp_path: Path) -> None:
    train(tmp_path / "run", images)
    with (
        sole_trainer(tmp_path / "run"),  # another process, perhaps stopped
        pytest.raises(ConfigError, match="another process trains in"),
    ):
        train(tmp_path / "run", None, resume=True)
    train(tmp_path / "run", None, resume=True, resume_steps=1)
