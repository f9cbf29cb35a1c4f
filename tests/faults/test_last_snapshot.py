"""A run whose last step cannot be saved has not ended, whatever fails, and goes on once that is mended."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

import geartrain as gt
from geartrain.ams.client.cluster_status import cluster_status
from geartrain.ams.observe import failpoints
from geartrain.ams.storage.snapshot.folder import list_snapshots
from geartrain.workers.job import job, run
from geartrain.workers.job.folder import Run, read_run
from geartrain.workers.job.run import TrainingRun
from geartrain.workers.models import trained_model
from tests.faults.test_elastic import torchrun
from tests.faults.test_job_recovery import JOB, STEPS, images, served, train
from tests.integration.commands.test_up import kill_child, up
from tests.integration.jobs.small_job import stop_after
from tests.integration.jobs.test_classify_and_predict import one_thread
from tests.support.command_line import typed
from tests.support.movielens_files import write_movielens
from tests.support.served_models import require_onnx

__all__ = ["images", "one_thread"]
SETTINGS = ["--logger=none", "--steps=30", "--set=snapshots.steps=10"]
OF_CLICKS = ["--set=batch_size=4", "--set=dim=4"]
"""So small that the only look at the validation, whose model is kept, is that of the end."""
OF_PICTURES = ["--device=cpu", "--set=look.size=32", "--set=batch_size=8", "--set=width=8", "--set=dim=16"]
NO_SPACE = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def steps_of(out: Path) -> list[int]:
    """Of its snapshots, the newest first."""
    return [listed.snapshot.manifest.step for listed in list_snapshots(out / "snapshots") if listed.snapshot]


def require_ended(out: Path, *command: str) -> None:
    """The same command with --continue trains to the end, and then finds nothing to do."""
    done = typed(*command, "--continue")
    assert (done.returncode, "Going on at step" in done.stdout) == (0, True), done.stdout + done.stderr
    assert (read_run(out).ended, steps_of(out)[0]) == (True, 30)
    assert json.loads((out / "report.json").read_text(encoding="utf-8"))["steps"] == 30
    assert "has ended at step 30" in typed(*command, "--continue").stdout


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def ctr(tmp_path: Path, out: Path) -> list[str]:
    films = write_movielens(tmp_path / "films")
    return ["worker", "ctr", f"--data={films}", f"--out={out}", *SETTINGS, *OF_CLICKS]


@pytest.fixture
def fails_last(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """Let something happen right before the last save."""

    def arrange(happen: Callable[[], None]) -> None:
        whole = TrainingRun._save_last

        def save(self: TrainingRun, **how: Any) -> None:
            happen()
            whole(self, **how)

        monkeypatch.setattr(TrainingRun, "_save_last", save)

    return arrange


@contextmanager
def small_disk(place: Path) -> Iterator[Callable[[], Path]]:
    """A disk of 8 MB; what it yields fills it to the last byte, and returns the file to remove."""
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", place], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("this user may mount nothing")

    def fill() -> Path:
        with (place / "filler").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
            while True:
                file.write(bytes(1 << 12))
        return place / "filler"

    try:
        yield fill
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


def test_a_run_on_a_disk_that_is_full_at_its_end_has_not_ended(ctr: list[str], tmp_path: Path) -> None:
    disk, go_on = tmp_path / "disk", tmp_path / "go on"
    out = disk / "run"
    command = [*ctr, f"--out={out}"]
    environment = {**os.environ, "GEARTRAIN_FAILPOINTS": f"job.save.before=pause({go_on})@3"}
    with small_disk(disk) as fill:
        with subprocess.Popen(
            [sys.executable, "-m", "geartrain", *command], env=environment, stderr=subprocess.PIPE, text=True
        ) as worker:
            assert worker.stderr is not None
            while "failpoint job.save.before" not in worker.stderr.readline():
                assert worker.poll() is None
            filler = fill()
            go_on.touch()
            said = worker.stderr.read()
        assert worker.returncode == 1
        assert "error: step 30 is not saved" in said and "saved is step 20" in said, said
        assert (read_run(out).ended, steps_of(out), (out / "report.json").exists()) == (False, [20, 10], False)
        filler.unlink()
        require_ended(out, *command)


@pytest.mark.parametrize(
    "command",
    [
        ["ctr", *OF_CLICKS],
        ["tdm", "--steps=15", "--set=rebuilds=1", "--set=batch_size=40", "--set=dim=4", "--set=beam=50"],
        ["classify", *OF_PICTURES, "--set=held_out=0.25", "--set=lr=0.1"],
        ["classify", *OF_PICTURES, "--set=held_out=0", "--set=lr=0.1"],
        ["classify", *OF_PICTURES, "--set=held_out=0", "--set=lr=0.1", "--rows=ranks"],
    ],
    ids=["ctr", "tdm", "classify", "classify without validation", "classify with rows on ranks"],
)
def test_no_job_ends_unsaved(command: list[str], images: Path, tmp_path: Path, out: Path) -> None:
    data = images if command[0] == "classify" else write_movielens(tmp_path / "films")
    command = ["worker", command[0], f"--data={data}", f"--out={out}", *SETTINGS, *command[1:]]
    with failpoints.armed("manifest.write.before=error(ENOSPC)@4"):
        failed = typed(*command)
    assert failed.returncode == 1, failed.stdout + failed.stderr
    assert "step 30 is not saved" in failed.stderr and f"worker {command[1]} --resume {out}" in failed.stderr
    assert (read_run(out).ended, steps_of(out), (out / "report.json").exists()) == (False, [20, 10], False)
    if "--set=held_out=0" in command or command[1] == "tdm":
        assert not (out / "model").exists()
    require_ended(out, *command)


@pytest.mark.parametrize("failing", ["block.write.before=error(ENOSPC)", "snapshot.rename.after=error(EIO)"])
def test_whatever_fails_in_the_last_snapshot_the_run_has_not_ended(
    failing: str, ctr: list[str], out: Path, fails_last: Callable[..., None]
) -> None:
    def arm() -> None:
        if not armed:
            armed.append(failpoints.armed(failing))
            armed[0].__enter__()

    armed: list[Any] = []
    fails_last(arm)
    failed = typed(*ctr)
    armed[0].__exit__(None, None, None)
    assert (failed.returncode, read_run(out).ended, (out / "report.json").exists()) == (1, False, False), failed.stderr
    require_ended(out, *ctr)


def test_a_folder_that_is_lost_before_the_last_snapshot(
    ctr: list[str], out: Path, fails_last: Callable[..., None]
) -> None:
    place, aside = out / "snapshots", out / "aside"

    def lose() -> None:
        if not aside.exists():
            place.rename(aside)
            place.touch()

    fails_last(lose)
    assert typed(*ctr).returncode == 1
    place.unlink()
    aside.rename(place)
    aside.mkdir()  # so that it is lost once
    assert not read_run(out).ended
    require_ended(out, *ctr)


@pytest.mark.parametrize("what", ["model", "report", "note"])
def test_a_run_ends_once_all_of_it_is_written(
    what: str, images: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise NO_SPACE

    def refuse_the_end(folder: Path, noted: Run) -> None:
        refuse() if noted.ended and noted.stage_end else write_run(folder, noted)

    write_run = run.write_run
    command = ["worker", "classify", f"--data={images}", f"--out={out}", *SETTINGS, *OF_PICTURES, "--set=held_out=0"]
    with monkeypatch.context() as broken:
        if what == "model":
            broken.setattr(trained_model, "seal_model", refuse)
        elif what == "report":
            broken.setattr(run, "write_json", refuse)
        else:
            broken.setattr(run, "write_run", refuse_the_end)
        failed = typed(*command)
    assert (failed.returncode, "error: No space left on device" in failed.stderr) == (1, True), failed.stderr
    assert (read_run(out).ended, steps_of(out)[0]) == (False, 30)
    require_ended(out, *command)
    assert gt.load_model(out).training["step"] == 30


@pytest.mark.parametrize("role", ["server", "scheduler"])
def test_a_job_that_loses_a_role_before_its_last_snapshot_goes_back_and_ends(
    role: str, images: Path, out: Path, fails_last: Callable[..., None]
) -> None:
    def kill() -> None:
        if kills:
            kills.pop()
            before = [shard.incarnation for shard in cluster_status(running.facts["scheduler"]).shards]
            kill_child(psutil.Process(running.process.pid), role)
            while role == "server":
                now = cluster_status(running.facts["scheduler"]).shards
                if {shard.state for shard in now} == {"up"} and [shard.incarnation for shard in now] != before:
                    break

    kills = [1]
    fails_last(kill)
    with up("--shards=1") as running:
        result, told = train(out, images, scheduler=running.facts["scheduler"])
    assert (result.finished, read_run(out).ended, steps_of(out)[0]) == (True, True, STEPS), told
    if role == "server":
        assert "Going on at step 20: 4 steps (" in told, told


@pytest.mark.parametrize(("rows", "rank"), [("ranks", 1), ("pull", 0)])
def test_all_ranks_fail_with_the_one_that_cannot_save(rows: str, rank: int, images: Path, out: Path) -> None:
    recipe = replace(JOB, rows=rows)
    with served() if rows == "pull" else nullcontext() as scheduler:
        with pytest.raises(ChildFailedError):
            torchrun(2, scheduler, images, out, STEPS, f"{rank}:{STEPS - 1}:disk", False, recipe)
        assert (read_run(out).ended, steps_of(out)[0], (out / "report.json").exists()) == (False, 20, False)
        result, told = train(out, images, recipe, scheduler=scheduler, continues=True)
    assert result.finished and "Going on at step 20" in told
    assert (read_run(out).ended, steps_of(out)[0]) == (True, STEPS)


def test_a_run_that_was_said_to_have_ended_and_was_not_saved_is_told_from_others(
    ctr: list[str], out: Path, tmp_path: Path
) -> None:
    """As one that ended so before this was looked at."""
    require_onnx()
    pytest.importorskip("pyarrow", reason="samples from files need the extra data")
    from geartrain.workers.ctr.samples.movielens import read_movielens
    from tests.unit.workers.ctr.test_ctr_predict import write_samples

    assert typed(*ctr).returncode == 0
    write_samples(tmp_path / "some.parquet", read_movielens(tmp_path / "films"))
    predict = ["predict", str(out), str(tmp_path / "some.parquet"), "--json"]
    export = ["export", str(out), "--to", str(tmp_path / "model"), "--json"]
    assert not [said for said in (typed(*predict).stderr, typed(*export).stderr) if "has not ended" in said]
    Path(list_snapshots(out / "snapshots")[0].path).rename(tmp_path / "gone")
    assert read_run(out).ended
    for command in (predict, export):
        done = typed(*command)
        assert done.returncode == 0 and json.loads(done.stdout)
        assert "has not ended: this is its model of step 20, and it is to end at step 30" in done.stderr
        *_, remedy = done.stderr.strip().splitlines()[-1].partition("with: geartrain ")
    assert typed(*remedy.split(), "--logger=none").returncode == 0
    assert (read_run(out).ended, steps_of(out)[0]) == (True, 30)
    assert "has not ended" not in typed(*predict).stderr
    Path(list_snapshots(out / "snapshots")[0].path).rename(tmp_path / "gone too")
    require_ended(out, *ctr)


def test_a_model_says_its_step_though_the_run_was_stopped(
    images: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_onnx()
    command = ["worker", "classify", f"--data={images}", f"--out={out}", *SETTINGS, *OF_PICTURES, "--set=held_out=0"]
    with monkeypatch.context() as told:
        told.setattr(job, "interruption", stop_after(14))
        assert typed(*command).returncode == 3
    picture = next(images.rglob("*.png"))
    named = typed("predict", str(out / "model"), str(picture))
    assert "has not ended: this is its model of step 14, and it is to end at step 30" in named.stderr
    exported = typed("export", str(out), "--to", str(tmp_path / "model"), "--json")
    assert "this is its model of step 14" in exported.stderr
    assert json.loads(exported.stdout)["version"] == 14


def test_a_stopped_run_that_cannot_be_saved_says_why_and_keeps_the_model_before(
    images: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["worker", "classify", f"--data={images}", f"--out={out}", *SETTINGS, *OF_PICTURES, "--set=held_out=0"]
    with monkeypatch.context() as told, failpoints.armed("manifest.write.before=error(ENOSPC)@3"):
        told.setattr(job, "interruption", stop_after(14))
        stopped = typed(*command)
    assert stopped.returncode == 3
    assert "step 14 is not saved: " in stopped.stdout and "Stopped at step 14; saved is step 10" in stopped.stdout
    assert not (out / "model").exists()
