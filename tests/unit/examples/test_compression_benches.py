"""The benches of sample trees at a tiny size: one model on every side, and rates of all workers together."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import geartrain as gt

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
pytest.importorskip("pyarrow", reason="samples from files need pyarrow")


@pytest.fixture
def benches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports a file of benchmarks/ by name; with few ids."""
    sys.path.insert(0, str(BENCHMARKS))
    for name in ("_repeated_users", "sparse_compression"):
        monkeypatch.setattr(importlib.import_module(name), "IDS", 200)
    yield importlib.import_module
    sys.path.remove(str(BENCHMARKS))


@pytest.mark.parametrize("side", ["trees", "plain"])
def test_a_worker_among_others_trains_the_model_that_one_alone_trains(benches: Any, tmp_path: Path, side: str) -> None:
    bench = benches("sparse_compression")
    plain, trees = benches("_repeated_users").write_samples(tmp_path, 400, 10)
    samples: Any = gt.TreeSamples(trees, batch_size=50) if side == "trees" else gt.ParquetSamples(plain, batch_size=50)
    batches = list(itertools.islice(bench.endless(samples, 50), 12))
    losses = []
    for with_others in (False, True):
        torch.manual_seed(0)
        with gt.local(num_shards=2) as cluster:
            step = bench.our_step(cluster, side, is_split=side == "trees", with_others=with_others)
            losses.append([float(step(batch)) for batch in batches])
    alone, among_others = losses
    assert among_others == pytest.approx(alone, rel=1e-4)
    assert sum(alone[8:]) < sum(alone[:4])  # the same samples, an epoch later


def test_rates_are_those_of_all_workers_and_shards_together(benches: Any) -> None:
    bench = benches("sparse_workers")
    turns = [bench.Turn(100, 2.0, 0.5), bench.Turn(300, 3.0, 1.5)]
    rates = bench.rates_of(turns, shards_seconds=2.0)
    assert rates == bench.Rates(a_second=150.0, a_processor_second=100.0, shards_part=0.5)
