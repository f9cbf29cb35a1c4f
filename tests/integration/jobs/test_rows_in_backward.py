"""Jobs of several ranks write rows at the end of the backward pass, while gradients travel; the result is the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from geartrain.workers.classify.trainer import ImageTrainer
from geartrain.workers.job.options import SnapshotSettings
from geartrain.workers.recipes.recipe import ClassifyRecipe, FccsSettings
from tests.faults.test_elastic import torchrun
from tests.integration.jobs.small_job import GREY, classify, draw_images
from tests.integration.jobs.test_classify_and_predict import assert_same_state

STEPS = 4
RECIPE = ClassifyRecipe(
    steps=STEPS, batch_size=8, width=8, dim=8, warmup_steps=2, look=GREY, held_out=0.25, lr=0.05, row_momentum=0.9
)
RECIPE = replace(RECIPE, snapshots=SnapshotSettings(steps=STEPS))
EVERYTHING = replace(
    RECIPE,
    rows="ranks",
    select="knn",
    sample_rate=0.5,
    near=1.0,
    micro_batches=2,
    lars=True,
    sparsity=0.9,
    fccs=FccsSettings(max_batch=24, initial_steps=2),
)


def main(scheduler: str | None, images: Path, out: Path, recipe: ClassifyRecipe, is_apart: bool) -> str:
    """Train as a rank, stepping rows by themselves if ``is_apart``; return the optimizers in order of their steps."""
    torch.set_num_threads(1)
    if is_apart:
        ImageTrainer.steps_in_backward = property(lambda _: False, lambda *_: None)  # type: ignore[assignment]
    stepped: list[str] = []
    register_optimizer_step_post_hook(lambda optimizer, *_: stepped.append(type(optimizer).__name__))
    classify(out, images, recipe, scheduler=scheduler)
    return " ".join(stepped)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_images(tmp_path_factory.mktemp("drawn") / "images", 10)


@pytest.mark.parametrize("recipe", [RECIPE, EVERYTHING], ids=["pulled rows", "everything on"])
def test_rows_are_written_before_the_gradients_have_come_and_are_those_of_a_step_of_their_own(
    recipe: ClassifyRecipe, images: Path, tmp_path: Path, served: Callable[..., Any]
) -> None:
    scheduler = served(2).address if recipe.rows == "pull" else None
    within, apart = tmp_path / "within", tmp_path / "apart"
    dense = "LARS" if recipe.lars else "SGD"
    told = torchrun(2, scheduler, images, within, recipe, False, entry=main)
    assert told.split() == ["RowOptimizer", dense] * STEPS
    told = torchrun(2, scheduler, images, apart, recipe, True, entry=main)
    assert told.split() == [dense, "RowOptimizer"] * STEPS
    assert_same_state(apart, within)


def test_rows_of_a_scaled_loss_are_written_after_it_is_unscaled(images: Path, tmp_path: Path) -> None:
    recipe = replace(RECIPE, rows="ranks", dtype="float16_masters")
    told = torchrun(2, None, images, tmp_path / "run", recipe, False, entry=main)
    assert told.split() == ["SGD", "RowOptimizer"] * STEPS
