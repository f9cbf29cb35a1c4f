"""The bench of click models, at a tiny size: both sides learn the same, from the same batches."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from geartrain.workers.ctr.recipe import CtrRecipe
from geartrain.workers.ctr.samples.movielens import read_movielens
from tests.support.movielens_files import write_movielens

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.mark.parametrize("history", [0, 5])
def test_ours_and_plain_torch_learn_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, history: int) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    clicks: Any = importlib.import_module("_torch_clicks")
    recipe = CtrRecipe(dim=4, hidden=(8,), batch_size=50, steps=60, row_lr=0.1, history=history)
    ours, theirs = clicks.both_aucs(read_movielens(write_movielens(tmp_path)), recipe)
    assert min(ours, theirs) > 0.9
    assert abs(ours - theirs) < 0.05
