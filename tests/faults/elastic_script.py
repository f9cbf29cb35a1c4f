"""A job for test_elastic: ``geartrain worker`` under torchrun, one of whose ranks dies once."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from geartrain.workers import jobs
from geartrain.workers.loop import Trainer
from geartrain.workers.run import JobOptions
from tests.faults.test_job_recovery import JOB
from tests.integration.test_classify_and_predict import LOOK


def main(scheduler: str, images: str, out: str, steps: str, dies: str, *flags: str) -> None:
    """``dies``: RANK:STEP at which that rank dies in its first life, or "never"."""
    torch.set_num_threads(1)
    whole = Trainer._step
    first_life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"

    def step(self: Trainer, number: int) -> torch.Tensor:
        if first_life and dies == f"{os.environ.get('RANK', '0')}:{number}":
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(self, number)

    Trainer._step = step  # type: ignore[method-assign]
    options = JobOptions(
        out=Path(out),
        recipe=replace(JOB, steps=int(steps)),
        preprocessing=LOOK,
        device="cpu",
        scheduler=scheduler,
        resume="--resume" in flags,
        resume_steps=int(steps),
        overwrite="--overwrite" in flags,
    )
    jobs.train_folder(options, folder=Path(images), held_out=0.25, console=Console(width=200))


if __name__ == "__main__":
    main(*sys.argv[1:])
