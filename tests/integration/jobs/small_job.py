"""A worker's job on ten tiny classes: images, one call that trains, and a way to stop it."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from safetensors.torch import load_file

from geartrain.workers import jobs
from geartrain.workers.data.bitmaps import Preprocessing
from geartrain.workers.job.interruption import Interruption
from geartrain.workers.job.options import JobOptions, JobResult
from geartrain.workers.recipes.recipe import ClassifyRecipe

GREY = Preprocessing(kind="photo", size=32, channels=1)
"""One channel: the projection is solved 27 times faster."""


def draw_images(folder: Path, classes: int) -> Path:
    """Four noisy images of each class, one sub-folder a class."""
    random = np.random.default_rng(0)
    for number in range(classes):
        own = folder / f"class-{number}"
        own.mkdir(parents=True)
        pattern = random.integers(0, 200, (32, 32), np.uint8)
        for copy in range(4):
            noise = random.integers(0, 50, (32, 32), np.uint8)
            Image.fromarray(pattern + noise).save(own / f"{copy}.png")
    return folder


def classify(
    out: Path, images: Path | None, recipe: ClassifyRecipe, said: io.StringIO | None = None, **settings: Any
) -> JobResult:
    """Train ``recipe`` in one process; ``settings`` are further fields of JobOptions."""
    data = None if images is None else str(images)
    options = JobOptions(**{"job": "classify", "out": out, "recipe": recipe, "data": data, "device": "cpu", **settings})
    return jobs.train(options, Console(file=said or io.StringIO(), width=400))


def said_by(out: Path, images: Path | None, recipe: ClassifyRecipe, **settings: Any) -> str:
    """What a training that finishes tells."""
    said = io.StringIO()
    assert classify(out, images, recipe, said, **settings).finished
    return said.getvalue()


def stop_after(steps: int) -> Callable[[], object]:
    """In the place of ``interruption``: told to stop when so many steps are done."""

    def interruption() -> AbstractContextManager[Interruption]:
        asked = count()
        return nullcontext(StopWhen(lambda: next(asked) >= steps))

    return interruption


class StopWhen(Interruption):
    """Told to stop by a test."""

    def __init__(self, told: Callable[[], bool]) -> None:
        super().__init__()
        self._told = told

    def __call__(self) -> bool:
        return self._told()


def rows_of(run: Path) -> torch.Tensor:
    return load_file(run / "model" / "centers.safetensors")["centers"]
