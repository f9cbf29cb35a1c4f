"""The problems of ``geartrain bench defaults``, and the ways of ``bench accuracy_baselines``, at a tiny size."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import geartrain as gt

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    threads = torch.get_num_threads()
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    problems = importlib.import_module("_default_problems")
    monkeypatch.setattr(problems, "TEST", 40)
    monkeypatch.setattr(problems, "BATCH", 8)
    yield importlib.import_module("defaults")
    torch.set_num_threads(threads)


def test_each_problem_is_a_function_of_its_seed(bench: Any) -> None:
    assert len(bench.problems(0, 2)) == 6
    for first, again, other in zip(bench.problems(0, 2), bench.problems(0, 2), bench.problems(1, 2), strict=True):
        try:
            first_made, again_made, other_made = first(), again(), other()
        except gt.errors.ConfigError:  # the extra "bench" is not installed
            continue
        assert len(first_made.batches) == 2 and len(first_made.test[1]) == 40
        assert int(first_made.test[1].min()) >= 0 and int(first_made.test[1].max()) < first_made.num_classes
        assert all(torch.equal(*pair) for pair in zip(first_made.test, again_made.test, strict=True))
        assert not torch.equal(first_made.test[0], other_made.test[0])
        assert first_made.backbone()(first_made.batches[0][0]).shape == (8, first_made.dim)


def test_a_problem_whose_package_is_missing_names_the_extra(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("_default_problems")._icon_bitmaps.cache_clear()
    for make, package in zip(bench.problems(0, 2)[4:], ("fonticon_mdi7", "wordfreq"), strict=True):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(gt.errors.ConfigError, match=rf"needs {package}.*pip install '.\[bench\]'"):
            make()


def test_every_arm_is_trained_and_told(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    digits = bench.problems(0, 1)[1]
    monkeypatch.setattr(bench, "problems", lambda *_: [digits])
    monkeypatch.setattr(bench, "THREADS", 1)
    found = bench.run_all(list(bench.ARMS), seeds=1, steps=1)
    ((name, arms),) = found.items()
    assert name == "digits, 10 classes" and list(arms) == list(bench.ARMS)
    assert arms["nn.Linear"] == pytest.approx(arms["ClassHead"], abs=2.6)  # one step apart by what a bias does
    assert "| nn.Linear |" in bench.table(found)
    assert [case["target"] for case in bench.cases(found)] == [1.0] * 4


def test_what_is_allowed_counts_for_us(bench: Any) -> None:
    arms = {arm: [50.0, 52.0] for arm in bench.ARMS}
    first, last, by_hand, near = bench.cases({"p": arms})
    assert (first["ours"], first["theirs"], first["ratio"]) == (51.0, 50.5, 1.01)
    assert (last["theirs"], last["ratio"]) == (by_hand["theirs"], by_hand["ratio"]) == (49.0, 1.041)
    assert near["theirs"] == 50.0


@pytest.mark.usefixtures("bench")
def test_the_leaf_of_a_row_in_the_forest_of_selective_softmax_is_small_and_holds_its_class() -> None:
    baselines = importlib.import_module("accuracy_baselines")
    rows = torch.randn(500, 8, generator=torch.Generator().manual_seed(0))
    leaves = baselines._Tree(rows).leaf_of(torch.arange(1, 501)[:, None] * rows)  # their lengths say nothing
    assert all(label in leaf for label, leaf in enumerate(leaves))
    assert max(map(len, leaves)) <= baselines.LEAF


@pytest.mark.usefixtures("bench")
def test_every_way_of_the_baselines_names_held_out_samples() -> None:
    baselines = importlib.import_module("accuracy_baselines")
    found = baselines.run_all(1, 2)
    assert list(found) == [*baselines.HEADS, baselines.FOREST, baselines.SKETCH]
    assert all(0 <= one <= 100 for (one,) in found.values())
    assert baselines.table(found).count("\n") == 1 + len(found)
