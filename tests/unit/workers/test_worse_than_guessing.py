"""A model that is worse than guessing is said to be."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from geartrain.workers import jobs
from geartrain.workers.classify.report import worse_than_guessing as worse_than_the_commonest
from geartrain.workers.ctr.metrics import Scores, measured, worse_than_guessing
from geartrain.workers.ctr.recipe import CtrRecipe
from geartrain.workers.job.options import JobOptions
from geartrain.workers.recipes.recipe import ClassifyRecipe
from tests.integration.jobs.small_job import GREY, draw_images, said_by
from tests.support.movielens_files import write_movielens


def test_of_clicks_below_the_mean_click_rate() -> None:
    clicks = np.array([0, 0, 0, 1])
    assert worse_than_guessing(measured(Scores(np.array([0.2, 0.2, 0.2, 0.4]), clicks, None))) is None
    assert "row_lr" in str(worse_than_guessing(measured(Scores(np.array([0.9, 0.9, 0.9, 0.1]), clicks, None))))


@pytest.mark.parametrize("clicked", [0, 1])
def test_samples_of_one_outcome_are_said_to_tell_nothing(clicked: int) -> None:
    said = worse_than_guessing(measured(Scores(np.array([0.2, 0.4]), np.full(2, clicked), None)))
    assert "all are clicked or none is" in str(said) and "row_lr" not in str(said)


def test_of_images_below_the_commonest_class() -> None:
    labels = torch.tensor([3, 3, 3, 5])
    assert worse_than_the_commonest(0.75, labels) is None
    assert "0.7500 of the images" in str(worse_than_the_commonest(0.7, labels))
    assert worse_than_the_commonest(0.0, labels[:0]) is None


def test_a_job_of_clicks_says_so_at_its_end(tmp_path: Path) -> None:
    recipe = CtrRecipe(dim=4, hidden=(8,), batch_size=50, steps=5, row_lr=20.0)  # far too large
    options = JobOptions(job="ctr", out=tmp_path / "run", recipe=recipe, data=str(write_movielens(tmp_path / "films")))
    jobs.train(options, Console(file=(said := io.StringIO()), width=400))
    assert "That is worse than saying the mean click rate of every sample" in said.getvalue()


def test_a_job_of_images_says_so_at_its_end(tmp_path: Path) -> None:
    images = draw_images(tmp_path / "images", 8)
    recipe = ClassifyRecipe(
        steps=1, batch_size=8, width=8, dim=16, look=GREY, held_out=0.25, imprint=False, lr=1e-9, seed=1
    )
    said = said_by(tmp_path / "run", images, recipe)  # centers stay where chance put them
    assert "That is worse than always naming the commonest class, which 0.1250 of the images have" in said
