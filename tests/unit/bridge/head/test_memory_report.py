"""What a head is said to take against what it takes, and against PLSC's published figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import geartrain as gt
from geartrain.ams.graph.building.builder import build_neighbours
from geartrain.ams.graph.building.rows import ArrayRows
from tests.support import heads

GIB = 2**30
BF16: dict[str, Any] = {"dtype": "bfloat16", "slot_dtype": "bfloat16"}
WIDE: dict[str, Any] = {"num_classes": 80_000, "dim": 256, "sample_rate": 0.4}
CASES: dict[str, dict[str, Any]] = {
    "active rows held, one shard": {"num_classes": 200_000, "dim": 128, "sample_rate": 0.4, "num_shards": 1},
    "held, cut for two shards": {"num_classes": 200_000, "dim": 128, "sample_rate": 0.4, "num_shards": 2},
    "streamed": {"num_classes": 200_000, "dim": 128, "sample_rate": 1.0, "num_shards": 1},
    "sixteen bits": {"num_classes": 80_000, "dim": 256, "sample_rate": 0.4, "num_shards": 1, "dtype": "float16"},
    "pulled, bf16": {**WIDE, **BF16},
    "hosted, gradients in chunks": {"rows": "hosted", "num_classes": 200_000, "dim": 128, "sample_rate": 0.4},
    "hosted, gradients held": {"rows": "hosted", "num_classes": 200_000, "dim": 128, "sample_rate": 0.25},
    "hosted, two shards": {"rows": "hosted", "num_classes": 200_000, "dim": 128, "sample_rate": 0.25, "num_shards": 2},
    "hosted, fp16": {**WIDE, "rows": "hosted", "dtype": "float16", "slot_dtype": "float16"},
    "hosted, bf16": {**WIDE, "rows": "hosted", **BF16},
    "hosted, large batches": {**WIDE, "rows": "hosted", "sample_rate": 1.0, "batch_size": 512},
    "on ranks": {**WIDE, "rows": "ranks"},
    "on ranks, all active": {**WIDE, "rows": "ranks", "sample_rate": 1.0},
    "on ranks, fp16": {**WIDE, "rows": "ranks", "dtype": "float16", "slot_dtype": "float16"},
    "on ranks, bf16, all active": {**WIDE, "rows": "ranks", "sample_rate": 1.0, **BF16},
    "on ranks, large batches": {**WIDE, "rows": "ranks", "sample_rate": 1.0, "batch_size": 512},
}
QUICK = ("held, cut for two shards",)


def report_of(case: dict[str, Any]) -> Any:
    settings = {key: value for key, value in case.items() if key != "sample_rate"}
    select = gt.PartialFC(case["sample_rate"]) if case["sample_rate"] < 1 else gt.FullSoftmax()
    return gt.memory_report(
        **heads.head_settings(**settings, select=select, optimizer=gt.SparseMomentum(0.1), num_threads=2)
    )


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="resident sizes are read from /proc")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in CASES]
)
def test_the_report_is_within_five_percent_of_what_is_measured(name: str) -> None:
    case = {"batch_size": 128, "dtype": "float32", "num_shards": 1, **CASES[name]}
    script = Path(__file__).resolve().parents[3] / "support" / "measure_head.py"
    done = subprocess.run([sys.executable, script, json.dumps(case)], capture_output=True, text=True, check=True)
    measured, report = json.loads(done.stdout), report_of(case)
    assert report.table_bytes == measured["table_bytes"]
    assert report.total_bytes == pytest.approx(measured["table_bytes"] + measured["step_bytes"], rel=0.05)
    assert report.step_bytes == pytest.approx(measured["step_bytes"], rel=0.25)


def test_plscs_published_figures_come_out() -> None:
    settings: dict[str, Any] = {"num_classes": 40_000_000, "dim": 512, "rows": "ranks", "num_ranks": 8}
    shared: dict[str, Any] = {**settings, "batch_size": 64, "select": gt.PartialFC(0.1)}
    sparse = gt.memory_report(**heads.head_settings(**shared, optimizer=gt.SparseMomentum(lr=0.1)))
    dense = gt.memory_report(**heads.head_settings(**shared, optimizer=gt.Momentum(lr=0.1)))
    assert sparse.plsc_bytes / 8 / GIB == pytest.approx(20.988, abs=0.02)  # they add rounded figures
    assert dense.plsc_bytes / 8 / GIB == pytest.approx(30.528, abs=0.02)  # they add rounded figures
    assert 1 - sparse.plsc_bytes / dense.plsc_bytes == pytest.approx(0.3125, abs=0.001)


def test_sixteen_bits_with_momentum_take_two_kibibytes_a_class() -> None:
    settings: dict[str, Any] = {"dtype": "float16", "slot_dtype": "float16", "optimizer": gt.SparseMomentum(lr=0.1)}
    report = gt.memory_report(**heads.head_settings(num_classes=1_000_000, dim=512, **settings))
    assert 2048 <= report.bytes_per_class <= 2048 * 1.01


@pytest.mark.parametrize("k", [5, 2000])
def test_the_graph_of_knn_softmax_is_counted_as_large_as_it_is(k: int) -> None:
    select = gt.KNNSoftmax(active=0.1, k=k)
    graph = build_neighbours(ArrayRows(np.eye(300, 300, dtype=np.float32)), k)
    (part,) = [part for part in gt.memory_report(num_classes=300, dim=300, select=select).parts if "graph" in part.name]
    assert (part.holder, part.standing, part.bytes) == ("rank", True, graph.num_bytes)
    everything = gt.memory_report(num_classes=300, dim=300, select=gt.KNNSoftmax(active=1.0, k=k))
    assert not [part for part in everything.parts if "graph" in part.name]


@pytest.mark.parametrize("rows", ["pull", "hosted", "ranks"])
@pytest.mark.parametrize("optimizer", [gt.SGD(0.1), gt.SparseMomentum(0.1)])
def test_the_parts_add_up_to_the_sums(rows: Any, optimizer: Any) -> None:
    report = gt.memory_report(
        num_classes=10_000_019, dim=64, rows=rows, optimizer=optimizer, num_shards=3, num_ranks=2, batch_size=32
    )
    peaks = {"shard": report.shard_bytes, "rank": report.rank_bytes}
    assert sum(part.bytes for part in report.parts) == sum(peaks.values())
    holder = "rank" if rows == "ranks" else "shard"
    standing = sum(part.bytes for part in report.parts if part.standing)
    count = 2 if rows == "ranks" else 3
    assert report.table_bytes <= standing * count <= report.table_bytes * 1.01  # the fullest, count times
    assert all(part.holder == holder for part in report.parts if part.standing)
    assert report.total_bytes == report.table_bytes + report.step_bytes


def test_the_table_for_a_person_names_every_part() -> None:
    report = gt.memory_report(num_classes=10_000_000, dim=512, num_shards=4)
    text = str(report)
    assert all(part.name in text for part in report.parts)
    assert "GiB" in text
    assert json.loads(json.dumps(report.to_json()))["total_bytes"] == report.total_bytes


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rows": "disk"}, "'disk'.*'pull'.*'hosted'.*'ranks'"),
        ({"num_shards": 0}, "num_shards is 0; .* from 1 to 4096"),
        ({"num_shards": 5000}, "num_shards is 5000.*4096"),
        ({"num_ranks": 0}, "num_ranks is 0"),
        ({"dim": 0}, "dim is 0"),
        ({"dtype": "int8"}, "int8"),
    ],
)
def test_settings_that_cannot_be_are_refused(wrong: dict[str, Any], message: str) -> None:
    settings: dict[str, Any] = {"num_classes": 10, "dim": 8, **wrong}
    with pytest.raises(gt.errors.InvalidArgument, match=message):
        gt.memory_report(**heads.head_settings(**settings))


def test_choosing_on_a_device_is_counted_there() -> None:
    def parts(**settings: Any) -> dict[str, int]:
        report = gt.memory_report(
            **heads.head_settings(num_classes=40_000, dim=8, device="cuda", rows="ranks", **settings)
        )
        return {part.name: part.bytes for part in report.parts}

    with_graph = parts(select=gt.KNNSoftmax(0.1, k=4))
    assert with_graph["graph of classes, to choose by"] == with_graph["graph of classes"] > 4 * 4 * 40_000
    on_ranks = parts(select=gt.KNNSoftmax(0.1, k=4), num_ranks=4)
    assert on_ranks["graph of classes, to choose by"] == 8 * 40_001 + 6 * 40_000
    sampled = parts(select=gt.PartialFC(0.1))
    assert sampled["choosing of the active classes"] < with_graph["choosing of the active classes"] < 8 << 20
    assert "choosing of the active classes" not in parts(select=gt.FullSoftmax())


@pytest.mark.parametrize(
    ("optimizer", "formula"),
    [
        (gt.RowWiseAdagrad(), "n·4"),
        (gt.RowWiseAdam(), "n·(D·4 + 4)"),
        (gt.FTRL(), "n·D·8"),
        (gt.RMSProp(momentum=0.9, centered=True), "n·D·12"),
    ],
    ids=str,
)
def test_slots_are_reported_by_their_width(optimizer: Any, formula: str) -> None:
    report = gt.memory_report(num_classes=1000, dim=64, optimizer=optimizer)
    part = next(part for part in report.parts if part.name.startswith("slots"))
    assert part.formula == formula
    assert part.bytes == 1000 * optimizer.slot_dim(64) * 4
