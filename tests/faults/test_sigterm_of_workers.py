"""SIGTERM of a worker, whatever it does at that moment: it ends before it would be killed, saved, or says why not."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

import geartrain as gt
from geartrain.ams.observe.failpoints import VARIABLE
from geartrain.ams.storage.snapshot.folder import list_snapshots
from tests.faults.test_stops_while_waiting import read_until, rest_of
from tests.integration.jobs.small_job import draw_images
from tests.support.movielens_files import write_movielens

STOPPED, NOTHING_SAVED = 3, 130
GRACE_SECONDS = 10.0
"""What it has, and on a machine that does much else what it may need more."""
BUSY_SECONDS = 20.0


@contextmanager
def command(arguments: Sequence[str], armed: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-m", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, VARIABLE: armed, "OMP_NUM_THREADS": "1"},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def ctr(tmp_path: Path, *more: str) -> list[str]:
    films = write_movielens(tmp_path / "films")
    arguments = ["geartrain", "worker", "ctr", "--data", str(films), "--out", str(tmp_path / "run"), "--logger=none"]
    small = ["--steps=20", "--set=batch_size=50", "--set=dim=4", "--set=snapshots.steps=5", f"--grace={GRACE_SECONDS}"]
    return [*arguments, *small, "--continue", *more]


def classify(tmp_path: Path, *more: str) -> list[str]:
    images = draw_images(tmp_path / "images", 4)
    look = ["--set=look.size=32", "--set=look.channels=1", "--set=lr=0.1", "--set=batch_size=4"]
    arguments = ["worker", "classify", "--data", str(images), "--out", str(tmp_path / "run"), "--steps=8"]
    return [*arguments, "--logger=none", *look, *more]


def stopped(process: subprocess.Popen[str]) -> str:
    """What it says behind SIGTERM until it has ended, in time."""
    told = time.monotonic()
    process.terminate()
    said = rest_of(process)
    assert time.monotonic() - told < GRACE_SECONDS + BUSY_SECONDS, said
    return said


@pytest.mark.parametrize(
    ("state", "doing"), [("torch", "loaded torch"), ("data", "loaded its data"), ("connect", "opened its cluster")]
)
def test_of_one_that_has_nothing_to_save(state: str, doing: str, tmp_path: Path) -> None:
    armed = f"job.{state}.before=pause({tmp_path / 'never'})"
    with command(ctr(tmp_path), armed) as process:
        read_until(process, f"failpoint job.{state}.before")
        said = stopped(process)
    assert process.returncode == NOTHING_SAVED, said
    assert f"Stopped while it {doing}: nothing is saved yet; the same command begins it again" in said
    assert "Traceback" not in said, said


def test_of_one_that_restores_its_rows_or_tests_its_model(tmp_path: Path) -> None:
    with command(ctr(tmp_path), f"job.report.before=pause({tmp_path / 'never'})") as process:
        read_until(process, "failpoint job.report.before")
        said = stopped(process)
    assert process.returncode == STOPPED and "Stopped at step 20 and saved. Go on with" in said, said
    for state, doing in (("torch", "loaded torch"), ("data", "loaded its data"), ("restore", "restored its rows")):
        with command(ctr(tmp_path), f"job.{state}.before=pause({tmp_path / 'never'})") as process:
            read_until(process, f"failpoint job.{state}.before")
            said = stopped(process)
        assert process.returncode == STOPPED, said
        assert f"Stopped while it {doing}: saved is step 20. Go on with: geartrain worker ctr" in said, said
    with command(ctr(tmp_path), "") as process:
        assert "Held out: AUC" in rest_of(process)
    assert process.returncode == 0


def test_of_one_whose_step_does_not_end(tmp_path: Path) -> None:
    with command(ctr(tmp_path, "--grace=3"), f"job.step.before=pause({tmp_path / 'never'})@13") as process:
        read_until(process, "failpoint job.step.before")
        said = stopped(process)
    assert process.returncode == STOPPED, said
    assert re.search("Stopped while it did a step: saved is step (5|10|12). Go on with", said), said


def test_of_one_that_is_saving(tmp_path: Path) -> None:
    go = tmp_path / "go"
    with command(ctr(tmp_path, "--grace=3"), f"block.write.before=pause({go})@4") as process:
        read_until(process, "failpoint block.write.before")
        process.terminate()
        read_until(process, "A snapshot is still being written")
        go.touch()
        said = rest_of(process)
    assert process.returncode == STOPPED, said
    saved = re.search(r"Stopped at step (\d+) and saved", said)
    assert saved, said
    assert list_snapshots(tmp_path / "run" / "snapshots")[0].name == f"step-{int(saved[1]):09}"


def test_of_one_that_writes_its_model(tmp_path: Path) -> None:
    tdm = ["tdm" if argument == "ctr" else argument for argument in ctr(tmp_path, "--set=rebuilds=0")]
    with command(tdm, f"model.publish.before=pause({tmp_path / 'never'})") as process:
        read_until(process, "failpoint model.publish.before")
        said = stopped(process)
    assert process.returncode == STOPPED and "Stopped at step 20 and saved" in said, said


def test_of_ranks_of_which_one_waits_in_compiled_code_for_the_other(tmp_path: Path) -> None:
    torchrun = ["torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=loopback", "-m", "geartrain"]
    armed = f"job.data.before=pause({tmp_path / 'never'})"
    with command([*torchrun, *classify(tmp_path, "--rows=ranks")], armed) as process:
        read_until(process, "failpoint job.data.before")
        said = stopped(process)
    assert "Stopped while it loaded its data: nothing is saved yet" in said, said
    assert process.returncode == 1 and signal.SIGKILL.name not in said, said


def test_of_ranks_of_which_one_saves_and_none_ends_its_step(tmp_path: Path) -> None:
    torchrun = ["torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=loopback", "-m", "geartrain"]
    armed = f"job.step.before=pause({tmp_path / 'never'})@3"
    with (
        gt.ops.Role("scheduler", listen="127.0.0.1:0", num_shards=1) as scheduler,
        gt.ops.Role("server", listen="127.0.0.1:0", scheduler=scheduler.address),
        command([*torchrun, *classify(tmp_path, f"--scheduler={scheduler.address}", "--grace=3")], armed) as process,
    ):
        read_until(process, "failpoint job.step.before")
        said = stopped(process)
    assert "Stopped while it did a step: saved is step 0. Go on with: torchrun" in said, said
    assert "Stopped while it did a step: what is saved, the first rank says. Go on with: torchrun" in said, said
