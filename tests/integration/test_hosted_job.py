"""A worker's job whose class centers are worked on beside where they are: ``geartrain worker ... --rows hosted``."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from geartrain.ams.client.hosted_calls import HostedCalls
from geartrain.ams.storage.snapshot.folder import list_snapshots
from geartrain.ams.values.errors import ConfigError
from geartrain.cli.training.worker import app
from geartrain.workers.data.bitmaps import Preprocessing
from geartrain.workers.job import job
from geartrain.workers.job.options import JobOptions
from geartrain.workers.job.state import JobState
from geartrain.workers.recipes import jobs
from geartrain.workers.recipes.recipe import Recipe
from tests.integration.conftest import ServedCluster
from tests.integration.small_job import draw_images, rows_of, stop_after, train

RECIPE = Recipe(
    steps=8, batch_size=8, width=8, dim=8, sample_rate=0.5, save_every=100, warmup_steps=2, row_momentum=0.9
)
HOSTED = replace(RECIPE, rows="hosted")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return draw_images(tmp_path / "images", 10)


def saved_rows(run: Path) -> str:
    newest = list_snapshots(run / "snapshots")[0].snapshot
    assert newest is not None
    return JobState.read(newest).recipe.rows


def test_a_hosted_job_learns_what_another_learns_and_goes_on_where_it_was_stopped(
    tmp_path: Path, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates = []
    prepare = HostedCalls.prepare_update
    monkeypatch.setattr(
        HostedCalls, "prepare_update", lambda *args, **kwargs: updates.append(1) or prepare(*args, **kwargs)
    )
    train(tmp_path / "pulled", images, io.StringIO(), RECIPE)
    assert not updates
    train(tmp_path / "whole", images, io.StringIO(), HOSTED)
    assert len(updates) == RECIPE.steps
    torch.testing.assert_close(rows_of(tmp_path / "whole"), rows_of(tmp_path / "pulled"), rtol=1e-3, atol=1e-4)

    in_two = tmp_path / "in-two"
    with monkeypatch.context() as told:
        told.setattr(job, "interruption", stop_after(3))
        train(in_two, images, io.StringIO(), HOSTED)
    assert saved_rows(in_two) == "hosted"
    train(in_two, images, io.StringIO(), Recipe(), resume=True)
    torch.testing.assert_close(rows_of(in_two), rows_of(tmp_path / "whole"), rtol=0, atol=0)


def test_a_resumed_job_may_move_its_work(tmp_path: Path, images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path / "pulled", images, io.StringIO(), RECIPE)
    served = ServedCluster(2)
    try:
        run = tmp_path / "run"
        with monkeypatch.context() as told:
            told.setattr(job, "interruption", stop_after(3))
            train(run, images, io.StringIO(), RECIPE, scheduler=served.address)
        assert saved_rows(run) == "pull"
        train(run, images, io.StringIO(), Recipe(), scheduler=served.address, resume=True, rows="hosted")
    finally:
        served.stop()
    assert saved_rows(run) == "hosted"
    torch.testing.assert_close(rows_of(run), rows_of(tmp_path / "pulled"), rtol=1e-3, atol=1e-4)


def test_a_place_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rows is 'moon'; it must be one of pull, hosted, ranks"):
        JobOptions(out=tmp_path, recipe=RECIPE, preprocessing=Preprocessing(), rows="moon")
    with pytest.raises(ConfigError, match="rows is 'moon'"):
        replace(RECIPE, rows="moon")
    older = {name: value for name, value in RECIPE.to_json().items() if name != "rows"}
    assert Recipe.from_json(older) == RECIPE


@pytest.mark.parametrize("more", [[], ["--resume", "run"]])
def test_the_command_line_says_where(images: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]) -> None:
    from typer.testing import CliRunner

    given: list[JobOptions] = []

    def take(options: JobOptions, **_: object) -> object:
        given.append(options)
        raise KeyboardInterrupt

    monkeypatch.setattr(jobs, "train_folder", take)
    CliRunner().invoke(app, ["classify", "--data", str(images), "--rows", "hosted", *more])
    assert [one.rows for one in given] == ["hosted"]
