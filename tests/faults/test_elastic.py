"""Ranks under torchrun: when one dies torchrun starts all again, and they go on from their last snapshot together."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from geartrain.ams.storage.snapshot_folder import latest
from tests.faults.test_job_recovery import images, train
from tests.integration.test_classify_and_predict import assert_same_state
from tests.integration.test_up import up

__all__ = ["images"]
STEPS = 12
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def scheduler() -> Iterator[str]:
    with up("--shards=2") as running:
        yield str(running.facts["scheduler"])


def torchrun(ranks: int, *arguments: str, restarts: int = 0) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [f"--max-restarts={restarts}", "-m", "tests.faults.elastic_script", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=150)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def break_and_restart(scheduler: str, images: Path, out: Path) -> str:
    (out / "model").mkdir(parents=True)  # of an earlier run, which the restarted ranks must not take for their own
    return torchrun(2, scheduler, str(images), str(out), str(STEPS), "1:8", "--overwrite", restarts=1)


def test_ranks_that_torchrun_starts_again_go_on_together(scheduler: str, images: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    told = break_and_restart(scheduler, images, out)
    assert "Going on at step 5" in told
    assert (tmp_path / "run.previous" / "model").exists()
    job = latest(out / "snapshots").manifest.job
    assert (job["world_size"], job["progress"]["step"]) == (2, STEPS)  # type: ignore[index,call-overload]

    result, told = train(out, images, scheduler=scheduler, resume=True, resume_steps=3)  # with another number of ranks
    assert f"Going on at step {STEPS}" in told
    assert result.step == STEPS + 3
    assert latest(out / "snapshots").manifest.job["world_size"] == 1


@pytest.mark.slow
def test_what_ranks_lost_is_as_if_it_had_never_been(scheduler: str, images: Path, tmp_path: Path) -> None:
    torchrun(2, scheduler, str(images), str(tmp_path / "straight"), str(STEPS), "never")
    break_and_restart(scheduler, images, tmp_path / "broken")
    assert_same_state(tmp_path / "straight", tmp_path / "broken")
