"""A worker's job whose class centers are worked on beside where they are: ``geartrain worker ... --rows hosted``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from geartrain.ams.client.hosted_calls import HostedCalls
from geartrain.ams.storage.snapshot.folder import list_snapshots
from geartrain.ams.values.errors import ConfigError
from geartrain.workers.job import job
from geartrain.workers.recipes.recipe import ClassifyRecipe
from tests.integration.conftest import ServedCluster
from tests.integration.jobs.small_job import GREY, classify, draw_images, rows_of, stop_after
from tests.integration.jobs.test_classify_and_predict import one_thread

__all__ = ["one_thread"]

RECIPE = ClassifyRecipe(
    steps=8, batch_size=8, width=8, dim=8, sample_rate=0.5, warmup_steps=2, row_momentum=0.9, look=GREY, held_out=0.25
)
HOSTED = replace(RECIPE, rows="hosted")


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return draw_images(tmp_path / "images", 10)


def saved_rows(run: Path) -> str:
    newest = list_snapshots(run / "snapshots")[0].snapshot
    assert newest is not None
    return str(newest.manifest.job["recipe"]["rows"])  # type: ignore[index]


def test_a_hosted_job_learns_what_another_learns_and_goes_on_where_it_was_stopped(
    tmp_path: Path, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates = []
    prepare = HostedCalls.prepare_update
    monkeypatch.setattr(
        HostedCalls, "prepare_update", lambda *args, **kwargs: updates.append(1) or prepare(*args, **kwargs)
    )
    classify(tmp_path / "pulled", images, RECIPE)
    assert not updates
    classify(tmp_path / "whole", images, HOSTED)
    assert len(updates) == RECIPE.steps
    torch.testing.assert_close(rows_of(tmp_path / "whole"), rows_of(tmp_path / "pulled"), rtol=1e-3, atol=1e-4)

    in_two = tmp_path / "in-two"
    with monkeypatch.context() as told:
        told.setattr(job, "interruption", stop_after(3))
        classify(in_two, images, HOSTED)
    assert saved_rows(in_two) == "hosted"
    classify(in_two, images, RECIPE, resume=True)
    torch.testing.assert_close(rows_of(in_two), rows_of(tmp_path / "whole"), rtol=0, atol=0)


def test_a_resumed_job_may_move_its_work(tmp_path: Path, images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    classify(tmp_path / "pulled", images, RECIPE)
    served = ServedCluster(2)
    try:
        run = tmp_path / "run"
        with monkeypatch.context() as told:
            told.setattr(job, "interruption", stop_after(3))
            classify(run, images, RECIPE, scheduler=served.address)
        assert saved_rows(run) == "pull"
        classify(run, images, HOSTED, scheduler=served.address, resume=True, stated=("rows",))
    finally:
        served.stop()
    assert saved_rows(run) == "hosted"
    torch.testing.assert_close(rows_of(run), rows_of(tmp_path / "pulled"), rtol=1e-3, atol=1e-4)


def test_a_place_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="rows is 'moon'; it must be one of pull, hosted, ranks"):
        replace(RECIPE, rows="moon")
