"""The help of ``geartrain worker`` says what happens when an option is not given."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from geartrain.ams.values.errors import ConfigError
from geartrain.cli.training.worker import FEW_CLASSES, app
from geartrain.workers.recipes.recipe import Recipe

RECIPES: dict[str, Recipe] = {"glyphs": Recipe(), "classify": replace(Recipe(), **FEW_CLASSES)}  # type: ignore[arg-type]


def options(command: str) -> dict[str, Any]:
    group: Any = get_command(app)
    return {option.name: option for option in group.commands[command].params}


@pytest.mark.parametrize("command", RECIPES)
def test_every_option_shows_its_default(command: str) -> None:
    silent = [
        name
        for name, option in options(command).items()
        if not option.is_flag and option.default is None and not isinstance(option.show_default, str)
    ]
    assert silent == []


@pytest.mark.parametrize("command", RECIPES)
def test_the_defaults_shown_are_those_of_the_recipe(command: str) -> None:
    recipe = asdict(RECIPES[command])
    shown = {name: option.show_default for name, option in options(command).items() if name in recipe}
    sized_by_data = {"imprint", "lr"} if command == "classify" else set()  # what they are depends on the images
    stated = {name: text for name, text in shown.items() if name not in sized_by_data}
    assert stated == {name: str(recipe[name]) for name in stated}
    assert set(shown) - {"margin", "sub_centers", "backbone", "dim", "optimizer", "imprint"} == {
        "steps",
        "batch_size",
        "seed",
        "lr",
        "sample_rate",
        "select",
        "neighbours",
        "rebuild",
        "rows",
        "row_momentum",
        "sparsity",
        "row_momentum_untouched",
    }


def test_elapsed_momentum_needs_momentum() -> None:
    given = CliRunner().invoke(app, ["glyphs", "--row-momentum-untouched", "elapsed"])
    assert isinstance(given.exception, ConfigError)
    assert "without momentum nothing moves untouched class centers" in str(given.exception)
    with pytest.raises(ConfigError, match="row_momentum_untouched is 'later'; it must be one of freeze, elapsed"):
        replace(Recipe(), row_momentum=0.9, row_momentum_untouched="later")  # type: ignore[arg-type]
    saved = replace(Recipe(), row_momentum=0.9, row_momentum_untouched="elapsed")
    assert Recipe.from_json(saved.to_json()) == saved
