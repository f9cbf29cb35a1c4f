"""``geartrain worker ... --continue`` begins a run, goes on with it or has nothing to do; and where its rows are."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import geartrain as gt
from geartrain.ams.storage.snapshot.folder import list_snapshots
from geartrain.ams.values.errors import ConfigError, NonFinite, RunHeld, TrainingDiverged
from geartrain.cli.main import exit_code, main
from geartrain.workers.job import job
from geartrain.workers.job.folder import read_run, sole_trainer
from geartrain.workers.job.ranks import JobRanks
from geartrain.workers.job.run import TrainingRun
from tests.integration.conftest import ServedCluster
from tests.integration.jobs.small_job import stop_after
from tests.integration.jobs.test_classify_and_predict import invoke
from tests.support.movielens_files import write_movielens


@pytest.fixture
def ctr(tmp_path: Path) -> list[str]:
    films = write_movielens(tmp_path / "films")
    settings = ["--steps=30", "--logger=none", "--set=batch_size=50", "--set=dim=4", "--set=snapshots.steps=10"]
    return ["worker", "ctr", "--data", str(films), "--out", str(tmp_path / "run"), *settings]


def stopped_at(step: int, command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as told:
        told.setattr(job, "interruption", stop_after(step))
        code, said, _ = invoke(*command)
    assert code == 3, said


def test_the_same_command_again_and_again_begins_goes_on_and_ends(
    ctr: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [*ctr, "--continue", "--snapshots", str(tmp_path / "kept")]
    stopped_at(14, command, monkeypatch)
    code, said, _ = invoke(*command)
    assert (code, "Going on at step 14" in said) == (0, True), said
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    code, said, _ = invoke(*command)
    assert (code, "has ended at step 30" in said) == (0, True), said
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == before
    with pytest.raises(ConfigError, match=r"dim is 8, but the run .* was begun with 4"):
        invoke(*command, "--set=dim=8")


def test_a_run_whose_folder_is_lost_goes_on_from_its_snapshots(
    ctr: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [*ctr, "--continue", "--snapshots", str(tmp_path / "kept")]
    stopped_at(14, command, monkeypatch)
    shutil.rmtree(tmp_path / "run")
    code, said, _ = invoke(*command)
    assert (code, "Going on at step 14" in said) == (0, True), said
    assert (tmp_path / "run" / "report.json").exists()


def test_ranks_hear_of_a_run_that_has_ended_on_another_machine(
    ctr: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []

    def gather(_: JobRanks, value: Any) -> list[Any]:
        told.append(value)
        return [value, [True, 30]]

    assert invoke(*ctr, "--continue")[0] == 0
    monkeypatch.setattr(JobRanks, "gather_json", gather)
    for out in ("run", "lost"):
        assert invoke(*ctr, "--continue", "--out", str(tmp_path / out))[0] == 0
    assert told == [[True, 30], [False, None]]
    assert not (tmp_path / "lost").exists()


def test_a_run_that_died_before_its_first_snapshot_begins_again(
    ctr: list[str], tmp_path: Path, served: Callable[..., ServedCluster]
) -> None:
    ctr += ["--scheduler", served(1).address]

    def die(*_: object) -> None:
        raise RuntimeError("before the first snapshot")

    with pytest.MonkeyPatch.context() as broken:
        broken.setattr(TrainingRun, "_start", die)
        broken.setattr(job, "_drop_unsaved", lambda *_: None)  # as a process that is killed
        with pytest.raises(RuntimeError, match="before the first snapshot"):
            invoke(*ctr)
    assert (tmp_path / "run" / "run.json").exists()
    assert not list_snapshots(tmp_path / "run" / "snapshots")
    with gt.connect(ctr[-1]) as cluster:
        assert cluster.table_incarnations()
        code, said, _ = invoke(*ctr, "--continue")
        assert code == 0, said
        assert not cluster.table_incarnations()  # nor those of the one that died


def test_of_two_that_begin_a_run_at_once_one_does_and_the_other_is_to_come_later(
    ctr: list[str], tmp_path: Path, served: Callable[..., ServedCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    began = [*ctr, "--continue", "--scheduler", served(1).address]
    with sole_trainer(tmp_path / "run"):
        with pytest.raises(RunHeld, match="another process trains in"):
            invoke(*began)
        monkeypatch.setattr(sys, "argv", ["geartrain", *began])
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code == 4
    assert not (tmp_path / "run" / "run.json").exists()


def test_a_run_that_a_process_trains_in_a_cluster_is_not_resumed_beside_it(
    ctr: list[str], tmp_path: Path, served: Callable[..., ServedCluster]
) -> None:
    code, said, _ = invoke(*ctr, "--scheduler", served(1).address)
    assert code == 0, said
    with sole_trainer(tmp_path / "run"), pytest.raises(RunHeld, match="another process trains in"):
        invoke("worker", "ctr", "--resume", str(tmp_path / "run"))
    code, said, _ = invoke("worker", "ctr", "--resume", str(tmp_path / "run"))
    assert code == 0, said


def test_a_rate_that_diverges_is_not_worth_the_same_command_again() -> None:
    assert [exit_code(kind("x")) for kind in (TrainingDiverged, NonFinite)] == [2, 1]


def test_what_is_no_run_is_left_alone(ctr: list[str], tmp_path: Path) -> None:
    (tmp_path / "run" / "model").mkdir(parents=True)
    with pytest.raises(ConfigError, match="already holds a run that took no snapshot"):
        invoke(*ctr, "--continue")
    for other in (["--resume", str(tmp_path / "run")], ["--overwrite"]):
        with pytest.raises(ConfigError, match="--continue goes on"):
            invoke("worker", "glyphs", "--continue", *other)


def test_a_run_remembers_its_cluster_and_moves_when_it_is_told_to(
    ctr: list[str], tmp_path: Path, served: Callable[..., ServedCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, asked, whole = served(1).address, [], job.connect

    def connecting(where: str, **settings: Any) -> Any:
        if "stream" in settings:  # and not only to ask where its snapshots may go
            asked.append(where)
        return whole(where, **settings)

    monkeypatch.setattr(job, "connect", connecting)
    stopped_at(14, [*ctr, "--scheduler", address, "--snapshots", str(tmp_path / "kept")], monkeypatch)
    resume = ["worker", "ctr", "--resume", str(tmp_path / "run"), "--logger=none"]
    stopped_at(3, resume, monkeypatch)
    assert asked == [address, address]
    shutil.rmtree(tmp_path / "run")  # the snapshots know it, too
    stopped_at(3, [*ctr, "--continue", "--snapshots", str(tmp_path / "kept")], monkeypatch)
    assert asked == [address, address, address]
    code, said, _ = invoke(*resume, "--scheduler", "none")
    assert code == 0 and f"were in the cluster of {address}; from now on they are in the worker" in said, said
    assert len(asked) == 3 and read_run(tmp_path / "run").scheduler is None


def test_ranks_of_a_job_of_one_process_hear_so(ctr: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="'geartrain worker ctr' trains in one process, and torchrun has started 2"):
        invoke(*ctr)
