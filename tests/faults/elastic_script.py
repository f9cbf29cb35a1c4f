"""A job for test_elastic: what ``geartrain worker`` does on each rank under torchrun, one of which dies once."""

from __future__ import annotations

import gc
import io
import os
import signal
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from geartrain.ams.observe import failpoints
from geartrain.workers.classify.trainer import ImageTrainer
from geartrain.workers.recipes.recipe import ClassifyRecipe
from tests.faults.test_job_recovery import JOB
from tests.integration.jobs.small_job import classify


def main(
    scheduler: str | None,
    images: Path,
    out: Path,
    steps: int,
    dies: str,
    overwrite: bool,
    recipe: ClassifyRecipe = JOB,
    resume: bool = False,
) -> str:
    """``dies``: RANK:STEP at which that rank dies in its first life, RANK:STEP:disk at which its disk is full from then
    on, or "never". Returns what it told in its last."""
    torch.set_num_threads(1)
    whole = ImageTrainer.step
    first_life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"

    def step(self: ImageTrainer, number: int) -> torch.Tensor:
        if first_life and dies == f"{os.environ.get('RANK', '0')}:{number}":
            os.kill(os.getpid(), signal.SIGKILL)
        if first_life and dies == f"{os.environ.get('RANK', '0')}:{number}:disk":
            full_disk.enter_context(failpoints.armed("block.write.before=error(ENOSPC)"))
        return whole(self, number)

    leave = dist.destroy_process_group

    def left() -> None:  # what is left of DDP keeps threads, which would abort this process at its end
        assert not [item for item in gc.get_objects() if type(item) is DistributedDataParallel]
        leave()

    ImageTrainer.step = step  # type: ignore[method-assign]
    dist.destroy_process_group = left
    told, full_disk = io.StringIO(), ExitStack()
    settings = {"scheduler": scheduler, "resume": resume, "resume_steps": steps, "overwrite": overwrite}
    with full_disk:
        classify(out, images, replace(recipe, steps=steps), told, **settings)
    return told.getvalue()
