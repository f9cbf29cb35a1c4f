"""The workers of a click model's run, of which each sample adds one to its row of one more table of the run."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

import geartrain as gt
from geartrain.workers.ctr.recipe import recipe_for
from geartrain.workers.ctr.trainer import ClickTrainer
from geartrain.workers.job.job import run_job
from geartrain.workers.job.options import JobOptions, SnapshotSettings

COUNT = 3000
EPOCHS = 2


class CountedTrainer(ClickTrainer):
    """Says what it has trained on, and at the end how often each sample is in the rows."""

    pipe: Connection
    dies_at = -1
    """The batch after whose pushes, and before whose commit, it is killed."""

    def __init__(self, attempt: Any, data: Any) -> None:
        self._done = 0
        self._counts = attempt.cluster.create_table(
            f"{attempt.progress.table}/counts",
            dim=1,
            num_rows=COUNT,
            optimizer=gt.SGD(1.0),
            initializer=gt.Constant(0.0),
            reuse=attempt.state is not None,
        )
        super().__init__(attempt, data)

    def tables(self) -> list[str]:
        return [*super().tables(), self._counts.spec.name]

    def loss(self, step: int) -> Any:
        batch = self.samples._next  # type: ignore[attr-defined]
        self._ids = np.asarray(batch["at"])
        return super().loss(step)

    def update(self) -> None:
        super().update()
        self._counts.push(self._ids, -np.ones((len(self._ids), 1), np.float32))
        self._done += 1
        self.pipe.send(self._done)
        if self._done == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def report(self) -> dict[str, Any]:
        self.pipe.send(np.asarray(self._counts.pull(np.arange(COUNT)))[:, 0])
        return super().report()


def work(pipe: Connection, data: Path, scheduler: str, mode: str, more: dict[str, Any], dies_at: int) -> None:
    """Train, as the worker that begins the run, joins it (``joins``) or goes on with it (``continues``)."""
    CountedTrainer.pipe, CountedTrainer.dies_at = pipe, dies_at
    recipe = recipe_for(
        None,
        dim=4,
        hidden=(8,),
        batch_size=50,
        epochs=EPOCHS,
        patience=0,
        mode=mode,
        snapshots=SnapshotSettings(minutes=0.01),
    )
    out = data.parent / "run"
    options = JobOptions(
        job="ctr", recipe=recipe, loggers=(), out=out, data=str(data), scheduler=scheduler, cache=data.parent, **more
    )
    run_job(CountedTrainer, options, Console())
    pipe.send("done")
