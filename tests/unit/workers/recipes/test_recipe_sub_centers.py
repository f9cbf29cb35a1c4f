"""Several centers a class in a recipe."""

from __future__ import annotations

from typing import Any

import pytest

import geartrain as gt
from geartrain.ams.values.errors import InvalidArgument
from geartrain.workers.recipes.recipe import Recipe, head_of


def test_a_recipe_makes_a_head_of_as_many_centers_and_says_so() -> None:
    recipe = Recipe(dim=8, sub_centers=3, margin="arcface:16,0.3")
    assert Recipe.from_json(recipe.to_json()) == recipe
    with gt.local() as cluster:
        assert head_of(recipe, cluster, "t", 10).weights().shape == (10, 3, 8)
    older = {name: value for name, value in recipe.to_json().items() if name != "sub_centers"}
    assert Recipe.from_json(older).sub_centers == 1


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"margin": "none"}, "margin is None and sub_centers is 3"),
        ({"select": "knn"}, "KNNSoftmax.*sub_centers is 3"),
        ({"sub_centers": 0}, "sub_centers is 0"),
    ],
)
def test_what_knows_one_center_only_is_refused_before_anything_starts(more: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        Recipe(**{"sub_centers": 3, **more})
