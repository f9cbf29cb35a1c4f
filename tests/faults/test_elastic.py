"""Ranks under torchrun: when one dies torchrun starts all again, and they go on from their last snapshot together."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from geartrain.ams.storage.snapshot.folder import latest
from tests.faults import elastic_script
from tests.faults.test_job_recovery import images, train
from tests.integration.commands.test_up import up
from tests.integration.jobs.test_classify_and_predict import assert_same_state
from tests.support.forkserver import FORKSERVER

__all__ = ["images"]
STEPS = 12


@pytest.fixture(scope="module")
def scheduler() -> Iterator[str]:
    with up("--shards=2") as running:
        yield str(running.facts["scheduler"])


def torchrun(ranks: int, *arguments: Any, restarts: int = 0, entry: Callable[..., str] = elastic_script.main) -> str:
    """What rank 0 told, under the agent that ``torchrun`` is a command for."""
    told: dict[int, str] = launched(ranks, entry, *arguments, restarts=restarts)
    return told[0]


def launched(ranks: int, entry: Callable[..., Any], *arguments: Any, restarts: int = 0) -> dict[int, Any]:
    """What each rank returned from ``entry``; ranks are forked, which saves importing."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        max_restarts=restarts,
        rdzv_backend="loopback",
        run_id=uuid.uuid4().hex,
        start_method=FORKSERVER.get_start_method(),
        monitor_interval=0.05,
    )
    found: dict[int, Any] = elastic_launch(config, entry)(*arguments)
    return found


def break_and_restart(scheduler: str, images: Path, out: Path) -> str:
    (out / "model").mkdir(parents=True)  # of an earlier run, which the restarted ranks must not take for their own
    return torchrun(2, scheduler, images, out, STEPS, "1:8", True, restarts=1)


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
    torchrun(2, scheduler, images, tmp_path / "straight", STEPS, "never", False)
    break_and_restart(scheduler, images, tmp_path / "broken")
    assert_same_state(tmp_path / "straight", tmp_path / "broken")
