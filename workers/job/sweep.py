"""A learning rate from a few short trials.

Each trial trains a copy of the start, backbone and class centers, for a few steps at one rate, in this process alone,
and is judged by the loss on the validation: top-1 of a few hundred images tells too little. The order of the images,
their distortions and the warm-up are those of a run of so many steps. The training itself is as if its rate had been
given by hand: nothing of the trials remains but the number.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from geartrain.ams.client.factory import local
from geartrain.ams.programs.models import hosted_models
from geartrain.ams.values.errors import NonFinite
from geartrain.bridge.rows.tables import as_numpy
from geartrain.workers.atomic import write_json
from geartrain.workers.data.images import Images
from geartrain.workers.devices import images_at_once
from geartrain.workers.job.loop import Trainer
from geartrain.workers.job.ranks import JobRanks
from geartrain.workers.job.report import SWEEP
from geartrain.workers.job.row_timing import RowTimes
from geartrain.workers.job.state import Progress
from geartrain.workers.loggers.protocol import Loggers
from geartrain.workers.models.evaluate import every_nth
from geartrain.workers.recipes.recipe import Recipe, head_of

RATES = {"sgd": (0.003, 0.01, 0.03, 0.1, 0.3, 1.0), "adamw": (1e-4, 3e-4, 1e-3, 3e-3)}
MOST_CLASSES = 1 << 16
"""Of more, the copies of the rows would take too much of this process's memory and time."""
MOST_IMAGES = 2000
"""Of the validation, for one trial."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What came of one rate."""

    lr: float
    loss: float
    """Mean over the validation; infinite if the trial diverged."""


def trial_steps(steps: int) -> int:
    """Steps of a trial for a training of ``steps``: all trials together take less than half of it, and 360 at most."""
    return max(1, min(60, steps // 14))


def find_rate(
    recipe: Recipe,
    backbone: nn.Module,
    rows_CD: Tensor,
    train: Images,
    validation: Images,
    *,
    device: torch.device,
    bfloat16: bool,
    stop: Callable[[], bool],
    say: Callable[[str], None],
) -> list[Trial]:
    """Try the rates of :data:`RATES`; the backbone and ``rows_CD`` of a head, from which each begins, stay.

    Ends at a rate at which training diverges, and when ``stop`` says so.
    """
    steps, trials = trial_steps(recipe.steps), list[Trial]()
    say(f"Looking for a learning rate by trials of {steps} steps (--lr RATE needs none)")
    for lr in RATES[recipe.optimizer]:
        tried = replace(recipe, rate=lr / recipe.lr, steps=steps, rows="pull")
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            loss = _loss_after(tried, backbone, rows_CD, train, validation, device, bfloat16, stop)
        if loss is None:
            break
        trials.append(Trial(lr=lr, loss=loss))
        say(f"  rate {lr:g}: validation loss {loss:.4f}")
        if not math.isfinite(loss):
            break
    return trials


def best_rate(trials: list[Trial]) -> float | None:
    """The rate of the lowest loss; None if no trial ended well."""
    finite = [trial for trial in trials if math.isfinite(trial.loss)]
    return min(finite, key=lambda trial: trial.loss).lr if finite else None


def write_trials(folder: Path, trials: list[Trial]) -> None:
    """Note them in the run's folder."""
    finite = [trial.loss if math.isfinite(trial.loss) else None for trial in trials]
    write_json(folder / SWEEP, [asdict(trial) | {"loss": loss} for trial, loss in zip(trials, finite, strict=True)])


def _loss_after(
    recipe: Recipe,
    backbone: nn.Module,
    rows_CD: Tensor,
    train: Images,
    validation: Images,
    device: torch.device,
    bfloat16: bool,
    stop: Callable[[], bool],
) -> float | None:
    """Loss on the validation after a trial; None if it was stopped."""
    with local(num_shards=1, models=hosted_models()) as cluster:
        head = head_of(recipe, cluster, "trial", len(rows_CD))
        head.table.assign(np.arange(len(rows_CD)), as_numpy(rows_CD.flatten(1)))
        trainer = Trainer(
            backbone=copy.deepcopy(backbone),
            head=head,
            recipe=recipe,
            images=train,
            progress=Progress(step=0, stage_start=0, stage_steps=recipe.steps, table="trial"),
            ranks=JobRanks(),
            device=device,
            row_times=RowTimes(),
            bfloat16=bfloat16,
        )
        try:
            finished = trainer.run(
                stop=stop,
                due=lambda: False,
                save=lambda: None,
                look=lambda: None,
                line=None,
                events=Loggers(),
            )
            return _validation_loss(trainer, every_nth(validation, MOST_IMAGES), device) if finished else None
        except NonFinite:
            return math.inf


@torch.no_grad()
def _validation_loss(trainer: Trainer, images: Images, device: torch.device) -> float:
    trainer.backbone.eval()
    trainer.head.eval()
    total = 0.0
    for bitmaps, labels in images.batches(images_at_once(device), device):
        total += float(trainer.head(trainer.backbone(bitmaps).float(), labels)) * len(labels)
    return total / len(images)
