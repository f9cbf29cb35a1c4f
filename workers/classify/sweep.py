"""Search of a learning rate by a few short trials.

Each trial trains a copy of the start, backbone and class centers, for a few steps at one rate, in this process alone,
and is judged by the loss on the validation: top-1 of a few hundred images is too coarse. Image order, distortions and
warm-up are those of a run of that many steps. The training then runs as if its rate had been given: only the number
remains of the trials.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from geartrain.ams.client.factory import local
from geartrain.ams.programs.models import hosted_models
from geartrain.ams.values.errors import NonFinite
from geartrain.bridge.rows.tables import as_numpy
from geartrain.workers.atomic import write_json
from geartrain.workers.classify.trainer import ImageTrainer
from geartrain.workers.data.images import Images
from geartrain.workers.devices import images_at_once
from geartrain.workers.job.ranks import JobRanks
from geartrain.workers.job.state import JobProgress
from geartrain.workers.models.evaluate import every_nth
from geartrain.workers.recipes.recipe import FccsSettings, Recipe, head_of

RATES = {"sgd": (0.003, 0.01, 0.03, 0.1, 0.3, 1.0), "adamw": (1e-4, 3e-4, 1e-3, 3e-3)}
SWEEP = "sweep.json"
"""File of the trials of learning rates, in the run's folder."""
MAX_CLASSES = 1 << 16
"""Most classes: the copies of more rows would take too much memory and time of this process."""
MAX_IMAGES = 2000
"""Most validation images of one trial."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Result of one rate."""

    lr: float
    loss: float
    """Mean over the validation; infinite if the trial diverged."""


def trial_steps(steps: int) -> int:
    """Return the steps of a trial for a training of ``steps``: all trials take less than half of it, at most 360."""
    return max(1, min(60, steps // 14))


def found_rate(
    trainer: ImageTrainer, validation: Images | None, out: Path, *, stop: Callable[[], bool], say: Callable[[str], None]
) -> float:
    """Return the factor of the recipe's learning rates that short trials found best; store the trials in ``out``."""
    recipe, num_classes = trainer.recipe, trainer.head.num_classes
    if validation is None or trainer.ranks.world_size > 1 or num_classes > MAX_CLASSES:
        why = (
            "there is no validation"
            if validation is None
            else f"{trainer.ranks.world_size} ranks train together"
            if trainer.ranks.world_size > 1
            else f"there are more than {MAX_CLASSES:,} classes"
        )
        say(f"No trials of learning rates, since {why}: it is {recipe.lr:g}; --set lr=RATE gives another")
        return recipe.rate
    trials = find_rate(trainer, trainer.head.weights(), validation, stop=stop, say=say)
    finite = [trial.loss if math.isfinite(trial.loss) else None for trial in trials]
    write_json(out / SWEEP, [asdict(trial) | {"loss": loss} for trial, loss in zip(trials, finite, strict=True)])
    lr = best_rate(trials)
    if lr is None:
        say(f"No trial of a learning rate ended well: it stays {recipe.lr:g}")
        return recipe.rate
    say(f"Learning rate {lr:g}")
    return lr / recipe.lr


def find_rate(
    start: ImageTrainer,
    rows_CD: Tensor,
    validation: Images,
    *,
    stop: Callable[[], bool],
    say: Callable[[str], None],
) -> list[Trial]:
    """Try the rates of :data:`RATES`; each starts from copies of the backbone of ``start`` and of ``rows_CD``.

    Ends at a rate at which training diverges, and when ``stop`` returns True.
    """
    recipe, device = start.recipe, start.device
    steps, trials = trial_steps(recipe.steps), list[Trial]()
    say(f"Looking for a learning rate by trials of {steps} steps (--set lr=RATE needs none)")
    for lr in RATES[recipe.optimizer]:
        tried = replace(recipe, rate=lr / recipe.lr, steps=steps, rows="pull", row_dtype="float32", fccs=FccsSettings())
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            loss = _loss_after(tried, start, rows_CD, validation, stop)
        if loss is None:
            break
        trials.append(Trial(lr=lr, loss=loss))
        say(f"  rate {lr:g}: validation loss {loss:.4f}")
        if not math.isfinite(loss):
            break
    return trials


def best_rate(trials: list[Trial]) -> float | None:
    """Return the rate of the lowest loss; None if no trial ended well."""
    finite = [trial for trial in trials if math.isfinite(trial.loss)]
    return min(finite, key=lambda trial: trial.loss).lr if finite else None


def _loss_after(
    recipe: Recipe, start: ImageTrainer, rows_CD: Tensor, validation: Images, stop: Callable[[], bool]
) -> float | None:
    """Return the validation loss after a trial; None if it was stopped."""
    with local(num_shards=1, models=hosted_models()) as cluster:
        head = head_of(recipe, cluster, "trial", len(rows_CD))
        head.table.assign(np.arange(len(rows_CD)), as_numpy(rows_CD.flatten(1)))
        trainer = ImageTrainer(
            backbone=copy.deepcopy(start.backbone),
            head=head,
            recipe=recipe,
            images=start.images,
            progress=JobProgress(step=0, stage_start=0, stage_steps=recipe.steps, table="trial"),
            ranks=JobRanks(),
            device=start.device,
        )
        try:
            finished = trainer.run(stop=stop)
            return _validation_loss(trainer, every_nth(validation, MAX_IMAGES)) if finished else None
        except NonFinite:
            return math.inf


@torch.no_grad()
def _validation_loss(trainer: ImageTrainer, images: Images) -> float:
    trainer.backbone.eval()
    trainer.head.eval()
    total = 0.0
    for bitmaps, labels in images.batches(images_at_once(trainer.device), trainer.device):
        total += float(trainer.head(trainer.backbone(bitmaps).float(), labels)) * len(labels)
    return total / len(images)
