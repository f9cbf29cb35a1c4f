"""Keys for large batches, little memory and narrow types: each trains, and goes on after a stop as if without one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import nn

import geartrain as gt
from geartrain.ams.storage.snapshot.folder import latest
from geartrain.ams.values.errors import ConfigError, NonFinite
from geartrain.bridge.rows.serialization import state_from_bytes
from geartrain.workers.classify.float16 import LossScaler
from geartrain.workers.job import job
from geartrain.workers.job.keys import merged, recipe_of
from geartrain.workers.job.metrics import COUNTERS
from geartrain.workers.recipes.recipe import ClassifyRecipe, FccsSettings
from tests.faults.test_elastic import torchrun
from tests.integration.jobs.small_job import GREY, classify, draw_images, rows_of, said_by, stop_after
from tests.integration.jobs.test_classify_and_predict import assert_same_state, one_thread

__all__ = ["one_thread"]
STEPS = 8
RECIPE = ClassifyRecipe(
    steps=STEPS, batch_size=8, width=8, dim=8, warmup_steps=2, look=GREY, held_out=0.25, lr=0.05, dtype="float32"
)
KEYS: dict[str, dict[str, Any]] = {
    "fccs": {"fccs": FccsSettings(max_batch=32, initial_steps=3)},
    "lars": {"lars": True},
    "micro_batches": {"micro_batches": 3},
    "float16": {"dtype": "float16"},
    "float16_masters": {"dtype": "float16_masters"},
    "row_dtype": {"row_dtype": "bfloat16"},
}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_images(tmp_path_factory.mktemp("drawn") / "images", 10)


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(0)
    yield


def tensors_of(run: Path) -> dict[str, Any]:
    tensors: dict[str, Any] = state_from_bytes(latest(run / "snapshots").job_files()["training.safetensors"])
    return tensors


@pytest.mark.parametrize("name", KEYS)
def test_a_stopped_run_goes_on_as_if_it_had_not_been(
    name: str, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = replace(RECIPE, **KEYS[name])
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    said_by(whole, images, recipe)
    with monkeypatch.context() as told:
        told.setattr(job, "interruption", stop_after(5))
        assert not classify(stopped, images, recipe).finished
    told_of = said_by(stopped, images, recipe, resume=True)
    assert_same_state(whole, stopped)
    report, tensors = json.loads((whole / "report.json").read_text()), tensors_of(whole)
    network = [tensor.dtype for key, tensor in tensors["backbone"].items() if "trunk.0" in key]
    momentum = {state["momentum_buffer"].dtype for state in tensors["optimizer"]["state"].values()}
    if name == "fccs":
        batches = sum(recipe.batches(step) for step in range(recipe.steps))
        assert batches > recipe.steps
        assert report["epochs"] == pytest.approx(batches * recipe.batch_size / 30)
        assert f"{recipe.steps} steps of 8 samples and more: {report['epochs']:.1f} epochs" in told_of
        assert latest(whole / "snapshots").manifest.job["cursor"]["consumed"] == batches * recipe.batch_size
    if name == "lars":
        assert tensors["optimizer"]["param_groups"][0]["trust_coefficient"] == 0.02
    if name == "float16":
        assert network == [torch.float16]
        assert momentum == {torch.float16, torch.float32}  # that of norms
        assert report["versions"]["precision"] == "float16"
    if name == "float16_masters":
        assert network == [torch.float32]
        assert tensors["scaler"]["scale"] > 1
        assert report["versions"]["precision"] == "float16 autocast"
    if name == "row_dtype":
        assert load_file(whole / "model" / "centers.safetensors")["centers"].dtype == torch.bfloat16


def test_micro_batches_train_what_the_whole_batch_trains(images: Path, tmp_path: Path) -> None:
    whole, divided = tmp_path / "whole", tmp_path / "divided"
    said_by(whole, images, RECIPE)
    backward = gt.MicroBatches.backward
    with mock.patch.object(gt.MicroBatches, "backward", autospec=True, side_effect=backward) as went:
        said_by(divided, images, replace(RECIPE, micro_batches=3))
    assert [call.args[0].num for call in went.mock_calls] == [3] * RECIPE.steps
    torch.testing.assert_close(rows_of(divided), rows_of(whole), rtol=1e-3, atol=1e-4)


def test_more_micro_batches_than_images_of_a_rank_are_refused(images: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"micro_batches is 9, and a rank has 8 images.*give micro_batches=8 at most"):
        classify(tmp_path / "run", images, replace(RECIPE, micro_batches=9))


@pytest.mark.parametrize(
    "settings",
    [{"micro_batches": 2}, {"fccs": FccsSettings(max_batch=16)}, {"dtype": "float16_masters"}, {}],
    ids=["micro_batches", "fccs", "float16", "plain"],
)
def test_the_loss_and_its_gradients_are_timed_apart(settings: dict[str, Any], images: Path, tmp_path: Path) -> None:
    counted: list[Mapping[str, float]] = []
    with mock.patch.object(COUNTERS, "step_done", side_effect=lambda seconds, _: counted.append(seconds)):
        said_by(tmp_path / "run", images, replace(RECIPE, steps=3, **settings))
    assert len(counted) == 3
    assert all(step["forward"] > 0 and step["backward"] > 0 for step in counted)


def test_the_recipe_of_the_tutorial_has_everything_on_and_goes_on_after_a_rank_died(
    images: Path, tmp_path: Path
) -> None:
    page = Path(__file__).parents[3] / "docs" / "tutorials" / "hundred-million.md"
    _, _, rest = page.read_text(encoding="utf-8").partition('```yaml title="large.yaml"\n')
    of_page = yaml.safe_load(rest.partition("```")[0])
    assert {"select", "near", "graph", "fccs", "lars", "micro_batches", "sparsity", "dtype", "row_dtype"} <= set(
        of_page
    )
    small = {"batch_size": 8, "fccs": {"max_batch": 24, "initial_steps": 2}, "steps": STEPS, "warmup_steps": 2}
    small |= {"sample_rate": 0.5, "graph": {"k": 3}, "width": 8, "dim": 8, "held_out": 0.25, "look": asdict(GREY)}
    small |= {"snapshots": {"steps": 3}}
    recipe = recipe_of(ClassifyRecipe, merged(of_page, small))
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    torchrun(2, None, images, whole, STEPS, "never", False, recipe)
    told = torchrun(2, None, images, broken, STEPS, "1:5", False, recipe, restarts=1)
    assert "Going on at step 3" in told
    assert_same_state(whole, broken)
    tensors = tensors_of(broken)
    assert {"scaler", "gradients", "optimizer", "backbone"} <= set(tensors)
    assert latest(broken / "snapshots").manifest.job["cursor"]["consumed"] == 8 * recipe.batches_before(STEPS)


def test_a_loss_that_no_scale_makes_finite_is_an_error() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer, scaler = torch.optim.SGD([weight], lr=0.1), LossScaler("cpu", init_scale=1e-4)
    scaler.scale(weight.sum() * torch.inf).backward()
    scaler.step(optimizer)
    assert float(weight.detach()) == 1
    with pytest.raises(NonFinite, match=r"at every scale of the loss .*dtype=float16_masters"):
        scaler.update()
