"""Ranks under torchrun: when one dies torchrun starts all again, and they go on from their last snapshot together."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from geartrain.ams.storage.snapshot_folder import latest
from tests.faults.test_job_recovery import STEPS, images
from tests.integration.test_classify_and_predict import assert_same_state
from tests.integration.test_up import up

__all__ = ["images"]
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


def test_ranks_that_torchrun_starts_again_go_on_together(scheduler: str, images: Path, tmp_path: Path) -> None:
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    torchrun(2, scheduler, str(images), str(straight), str(STEPS), "never")
    (broken / "model").mkdir(parents=True)  # of an earlier run, which the restarted ranks must not take for their own
    told = torchrun(2, scheduler, str(images), str(broken), str(STEPS), "1:13", "--overwrite", restarts=1)
    assert "Going on at step 10" in told
    assert (tmp_path / "broken.previous" / "model").exists()
    assert_same_state(straight, broken)


def test_a_job_goes_on_with_another_number_of_ranks(scheduler: str, images: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    torchrun(2, scheduler, str(images), str(out), "6", "never")
    told = torchrun(1, scheduler, str(images), str(out), "6", "never", "--resume")
    assert "Going on at step 6" in told
    values = latest(out / "snapshots").manifest.job
    assert values["progress"]["step"] == 12  # type: ignore[index,call-overload]
    assert values["world_size"] == 1
