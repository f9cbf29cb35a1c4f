"""Registry of the jobs of ``geartrain worker``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from geartrain.workers.classify.classifier import FolderTrainer, GlyphTrainer
from geartrain.workers.ctr.trainer import ClickTrainer
from geartrain.workers.job.job import run_job
from geartrain.workers.job.keys import merged, recipe_of
from geartrain.workers.job.options import JobOptions, JobResult
from geartrain.workers.job.trainer import Trainer
from geartrain.workers.tdm.trainer import TreeTrainer

JOBS: dict[str, type[Trainer]] = {
    trainer.job: trainer for trainer in (GlyphTrainer, FolderTrainer, ClickTrainer, TreeTrainer)
}


def recipe_for(job: str, data: str | None, stated: Mapping[str, Any]) -> Any:
    """Return the recipe of a job on ``data`` with the ``stated`` keys, nested as the recipe is. Raises ConfigError."""
    trainer = JOBS[job]
    return recipe_of(trainer.recipe_class, merged(trainer.usual_recipe(data, stated), stated))


def train(options: JobOptions, console: Console) -> JobResult:
    """Train, evaluate and save. Raises ConfigError before anything is written."""
    return run_job(JOBS[options.job], options, console)
