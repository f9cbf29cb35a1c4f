"""Recipes of classifiers: what they refuse, what they make, and how they are written as text."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import geartrain as gt
from geartrain.ams.values.errors import ConfigError, InvalidArgument
from geartrain.workers.data.augment import Augmentation
from geartrain.workers.job.keys import read_recipe, recipe_of, with_settings, write_recipe
from geartrain.workers.jobs import recipe_for
from geartrain.workers.recipes.margins import MARGINS, margin_of
from geartrain.workers.recipes.recipe import (
    ClassifyRecipe,
    FccsSettings,
    GlyphRecipe,
    GraphSettings,
    Recipe,
    head_of,
    optimizer_of,
    selection_of,
)

SETTINGS = ["steps=7", "augmentation.elastic=0.2", "look.size=48", "rebuild=200", "row_lr=1e-3", "rows=hosted"]


def test_a_recipe_survives_settings_json_and_a_file(tmp_path: Path) -> None:
    recipe = recipe_of(ClassifyRecipe, with_settings({}, SETTINGS))
    assert (recipe.steps, recipe.augmentation, recipe.row_lr) == (7, Augmentation(elastic=0.2), 1e-3)
    assert (recipe.look, recipe.rebuild) == (replace(ClassifyRecipe().look, size=48), 200)
    assert recipe_of(ClassifyRecipe, json.loads(json.dumps(asdict(recipe)))) == recipe
    write_recipe(tmp_path, recipe)
    assert recipe_of(ClassifyRecipe, read_recipe(tmp_path / "recipe.yaml")) == recipe


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("augmentation.elastik=1", "no key 'augmentation.elastik'; did you mean 'augmentation.elastic'?"),
        ("held_out=0.2", "no key 'held_out'"),
        ("steps=x", "the recipe has steps = 'x': Input should be a valid integer"),
        ("dtype=half", "the recipe has dtype = 'half': Input should be 'auto', 'float32', 'bfloat16', 'float16'"),
        ("look=32", "the recipe has look = 32"),
        ("augmentation.elastic=-1", "elastic is -1.0"),
        ("snapshots.keep=0", "snapshots.keep is 0; it must be at least 1"),
        ("steps", "--set 'steps' is not KEY=VALUE"),
    ],
)
def test_a_key_or_value_that_cannot_be_is_named(setting: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        recipe_of(GlyphRecipe, with_settings({}, [setting]))
    assert message in str(caught.value)


def test_a_file_that_holds_no_recipe_is_named(tmp_path: Path) -> None:
    (tmp_path / "steps.yaml").write_text("600")
    with pytest.raises(ConfigError, match=r"steps\.yaml holds no keys"):
        read_recipe(tmp_path / "steps.yaml")
    with pytest.raises(ConfigError, match=r"none\.yaml cannot be read \(No such file .*\); give a YAML file, such as"):
        read_recipe(tmp_path / "none.yaml")


def test_what_a_classifier_is_follows_what_is_said() -> None:
    assert recipe_for("classify", None, {}) == ClassifyRecipe()
    assert not recipe_for("classify", None, {"backbone": "iresnet18"}).imprint
    assert recipe_for("classify", None, {"optimizer": "adamw"}).lr == 1e-3
    assert recipe_for("classify", None, {"optimizer": "adamw", "lr": "0.1"}).lr == 0.1
    assert recipe_for("classify", None, {"look": {"kind": "ink"}}).look.channels == 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"sample_rate": 0}, "sample_rate is 0"),
        ({"steps": 0}, "steps is 0"),
        ({"sparsity": 1.5}, r"sparsity is 1\.5; it must lie in \[0, 1\)"),
        ({"sparsity": 0.99, "optimizer": "adamw"}, "not for the optimizer 'adamw'; give optimizer='sgd'"),
        ({"row_momentum_untouched": "elapsed"}, "without momentum nothing moves untouched class centers"),
        ({"row_momentum": 0.9, "row_momentum_untouched": "later"}, "'later'; it must be one of freeze, elapsed"),
        ({"sub_centers": 3, "margin": "none"}, "margin is None and sub_centers is 3"),
        ({"sub_centers": 3, "select": "knn"}, "KNNSoftmax.*sub_centers is 3"),
        ({"sub_centers": 0}, "sub_centers is 0"),
        ({"select": "nearest"}, "select is 'nearest'"),
        ({"near": 1.5}, r"near is 1\.5; it must lie in \[0, 1\]"),
        ({"graph": GraphSettings(k=0)}, "graph.k is 0; it must be at least 1"),
        (
            {"fccs": FccsSettings(max_batch=300)},
            "fccs.max_batch is 300; it must be a multiple of batch_size, 256: give 256",
        ),
        ({"fccs": FccsSettings(initial_steps=-1)}, "fccs.initial_steps is -1; it must be at least 0"),
        ({"fccs": FccsSettings(max_batch=512, initial_steps=600)}, "fccs.initial_steps is 600, and steps is 600"),
        ({"lars": True, "optimizer": "adamw"}, "optimizer is 'adamw'; LARS is SGD"),
        ({"micro_batches": 0}, "micro_batches is 0"),
        ({"row_dtype": "float8_e4m3fn"}, "rows is 'pull'; give rows=ranks"),
        ({"sparsity": 0.9, "dtype": "float16"}, "give dtype=float16_masters"),
        ({"neighbours": 0}, "neighbours is 0"),
        ({"rebuild": 0}, "rebuild is 0"),
        ({"rebuild": "often"}, "rebuild is 'often'"),
        ({"select": "knn", "sample_rate": 1.0}, "sample_rate is 1, the full softmax"),
        *(
            ({"margin": margin}, margin)
            for margin in ("softmax", "none:3", "arcface:", "arcface:a", "arcface:1,2,3", "cosface:-1", "adaface:32,9")
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_starts(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument if "sub_centers" in wrong else ConfigError, match=message):
        Recipe(**wrong)


def test_a_recipe_makes_a_head_of_as_many_centers() -> None:
    with gt.local() as cluster:
        head = head_of(Recipe(dim=8, sub_centers=3, margin="arcface:16,0.3"), cluster, "t", 10)
        assert head.weights().shape == (10, 3, 8)


def test_momentum_and_decay_are_left_to_what_sparsifies() -> None:
    parameters = [nn.Parameter()]
    (plain,) = optimizer_of(Recipe(momentum=0.9, weight_decay=0.1, sparsity=0.99), parameters).param_groups
    assert (plain["momentum"], plain["weight_decay"], plain["nesterov"]) == (0, 0, False)
    (whole,) = optimizer_of(Recipe(momentum=0.9, weight_decay=0.1), parameters).param_groups
    assert (whole["momentum"], whole["weight_decay"], whole["nesterov"]) == (0.9, 0.1, True)


def test_batches_and_rates_of_fccs_are_those_of_its_schedule() -> None:
    recipe = Recipe(steps=40, batch_size=8, warmup_steps=5, lr=0.3, fccs=FccsSettings(max_batch=64, initial_steps=12))
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
    numbers = {"warmup_steps": 5, "initial_batch": 8, "max_batch": 64, "initial_steps": 12, "total_steps": 40}
    schedule = gt.FCCS(optimizer, **numbers, micro_batch=8)
    for step in range(45):
        assert recipe.batches(step) * 8 == schedule.batch
        assert recipe.batches_before(step) * 8 == schedule.samples
        assert 0.3 * recipe.rate_factor(step, 40) == pytest.approx(optimizer.param_groups[0]["lr"])
        schedule.step()
    assert (recipe.batches(11), recipe.batches(39)) == (1, 8)
    assert [Recipe().batches(step) for step in (0, 599)] == [1, 1]


def test_the_optimizer_may_be_lars_and_neighbours_have_their_part() -> None:
    optimizer = optimizer_of(Recipe(lars=True, lr=0.3, weight_decay=0.1), [nn.Parameter()])
    assert isinstance(optimizer, gt.LARS)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.3, 0.9, 0.1)
    chosen = selection_of(recipe_of(Recipe, with_settings({}, ["select=knn", "near=0.75", "graph.k=7"])))
    assert chosen == gt.KNNSoftmax(0.1, 7, "epoch", near=0.75)
    assert selection_of(Recipe(select="knn", neighbours=9)) == gt.KNNSoftmax(0.1, 9, "epoch")


def test_the_rate_rises_then_falls_to_nothing() -> None:
    factors = [Recipe(warmup_steps=10).rate_factor(step, 100) for step in range(100)]
    assert factors[0] < 0.11
    assert max(factors) > 0.95
    assert factors[-1] < 0.001
    assert factors[20:] == sorted(factors[20:], reverse=True)


def test_every_margin_of_the_library_has_a_name() -> None:
    of_library = {gt.ArcFace, gt.CosFace, gt.SphereFace, gt.CombinedMargin, gt.AdaFace, gt.MagFace}
    assert set(MARGINS.values()) == of_library | {gt.ElasticArcFace, gt.ElasticCosFace, gt.CurricularFace}


@pytest.mark.parametrize(
    ("text", "margin"),
    [
        ("none", None),
        ("cosface:32", gt.CosFace(scale=32)),
        ("combined:8,1,0.2,0.1", gt.CombinedMargin(scale=8, m1=1, m2=0.2, m3=0.1)),
        ("adaface:32,0.3,0.25", gt.AdaFace(scale=32, margin=0.3, h=0.25)),
        ("elasticcosface:32,0.3,0.02,7", gt.ElasticCosFace(scale=32, margin=0.3, std=0.02, seed=7)),
        ("curricularface", gt.CurricularFace()),
    ],
)
def test_numbers_of_a_margin_are_given_in_the_order_of_its_fields(text: str, margin: object) -> None:
    assert margin_of(text) == margin
