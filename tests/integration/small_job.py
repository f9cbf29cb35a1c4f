"""A worker's job on ten tiny classes: images, one call that trains, and a way to stop it."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from safetensors.torch import load_file

from geartrain.workers.data.bitmaps import Preprocessing
from geartrain.workers.job.interruption import Interruption
from geartrain.workers.job.options import JobOptions
from geartrain.workers.recipes import jobs
from geartrain.workers.recipes.recipe import Recipe


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


def train(out: Path, images: Path, said: io.StringIO, recipe: Recipe, **settings: object) -> None:
    """Train ``recipe`` on one process; ``settings`` are further fields of JobOptions."""
    look = Preprocessing(kind="photo", size=32, channels=1)
    options = JobOptions(out=out, recipe=recipe, preprocessing=look, device="cpu", **settings)  # type: ignore[arg-type]
    jobs.train_folder(options, folder=images, held_out=0.25, console=Console(file=said, width=200))


def stop_after(steps: int) -> Callable[[], object]:
    """In the place of ``interruption``: told to stop when so many steps are done."""

    def interruption() -> AbstractContextManager[Interruption]:
        asked = count()
        return nullcontext(Told(lambda: next(asked) >= steps))

    return interruption


class Told(Interruption):
    """Told to stop by a test."""

    def __init__(self, told: Callable[[], bool]) -> None:
        super().__init__()
        self._told = told

    def __call__(self) -> bool:
        return self._told()


def rows_of(run: Path) -> torch.Tensor:
    return load_file(run / "model" / "centers.safetensors")["centers"]
