"""Ranks under torchrun: when one dies torchrun starts all again, and they go on from their last snapshot together."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from geartrain.ams.storage.snapshot_folder import latest
from tests.faults.test_job_recovery import images
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


def test_ranks_that_torchrun_starts_again_go_on_together(scheduler: str, images: Path, tmp_path: Path) -> None:
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    torchrun(2, scheduler, str(images), str(straight), str(STEPS), "never")
    (broken / "model").mkdir(parents=True)  # of an earlier run, which the restarted ranks must not take for their own
    told = torchrun(2, scheduler, str(images), str(broken), str(STEPS), "1:8", "--overwrite", restarts=1)
    assert "Going on at step 5" in told
    assert (tmp_path / "broken.previous" / "model").exists()
    assert_same_state(straight, broken)

    told = torchrun(1, scheduler, str(images), str(broken), "6", "never", "--resume")  # another number of ranks
    assert f"Going on at step {STEPS}" in told
    job = latest(broken / "snapshots").manifest.job
    assert job["world_size"] == 1
    assert job["progress"]["step"] == STEPS + 6  # type: ignore[index,call-overload]
