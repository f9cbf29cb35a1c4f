"""Half-precision products of blocks: within their bound, and exact graphs from them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from geartrain.ams.graph.building.builder import build_neighbours
from geartrain.ams.graph.building.rows import ArrayRows, Floats
from geartrain.ams.values.errors import InvalidArgument
from geartrain.bridge.collectives.communicator import Communicator
from geartrain.bridge.head.selection import graph_products, rank_ring
from geartrain.bridge.head.selection.graph_products import TorchProducts
from geartrain.bridge.kernels.launch import interpreted
from tests.specification import ops as reference

DTYPES = [torch.float16, torch.bfloat16]


def rows_of(num_rows: int, dim: int) -> Floats:
    """Among them copies, zeros, near copies and rows that lean on one coordinate."""
    random = np.random.default_rng(num_rows)
    rows: Floats = random.standard_normal((num_rows, dim)).astype(np.float32)
    rows[1::7] = rows[0::7][: len(rows[1::7])]
    rows[2::31] = 0
    rows[3::11] = rows[5] + 1e-5 * rows[3::11]
    rows[4::13, 1:] *= 1e-6
    return rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("memory", [1 << 30, 120_000])
def test_the_graph_is_that_of_exact_products(dtype: torch.dtype, memory: int) -> None:
    rows = rows_of(500, 20)
    table = build_neighbours(ArrayRows(rows), 7, products=TorchProducts("cpu", dtype), memory_bytes=memory)
    np.testing.assert_array_equal(table.neighbours.reshape(500, 7), reference.nearest_neighbours(rows, 7))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 3, 128, 700])
def test_no_product_exceeds_the_error_bound(dtype: torch.dtype, dim: int) -> None:
    engine = TorchProducts("cpu", dtype)
    rows = np.concatenate([rows_of(150, dim), rows_of(100, dim) + 1]).astype(np.float32)
    unit = (rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30)).astype(np.float32)
    block = engine.load(unit, 0)
    true = unit.astype(np.float64) @ unit.astype(np.float64).T
    error = np.abs(engine.scores(block.rows_ND, block.rows_ND).numpy() / engine.unit - true).max()
    assert error <= engine.error_bound(dim)
    assert engine.error_bound(dim) < (0.005 if dtype == torch.float16 else 0.02)  # a bound of 2 would be one too


def test_small_columns_beside_a_large_one_are_no_subnormal_numbers() -> None:
    """Unscaled, columns of 1e-6 have four bits in float16, or none where subnormal numbers are flushed."""
    engine, random = TorchProducts("cpu"), np.random.default_rng(0)
    small = random.uniform(1, 9, (60, 2048)) * random.choice([-1e-6, 1e-6], (60, 2048))
    rows = np.concatenate([np.ones((60, 1)), small], axis=1).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    rounded = engine.load(rows, 0).rows_ND
    assert float(rounded.abs().min()) >= torch.finfo(torch.float16).tiny
    np.testing.assert_allclose(rounded.double().numpy() / 2**7, rows, rtol=2.0**-11)
    assert engine.error_bound(2049) < 2e-3  # of lost columns it is 7e-3
    table = build_neighbours(ArrayRows(rows), 5, products=engine)
    np.testing.assert_array_equal(table.neighbours.reshape(60, 5), reference.nearest_neighbours(rows, 5))


@pytest.mark.parametrize("memory", [1 << 30, 1])
def test_a_device_scores_exactly_what_the_cores_do(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter: rows with copies, near copies, zeros, one large column; in parts."""
    pytest.importorskip("triton")
    monkeypatch.setattr(rank_ring, "_BLOCK_ROWS", 32)
    monkeypatch.setattr(rank_ring, "_UPLOADED", 1)
    monkeypatch.setattr(graph_products, "upload", lambda array, _: torch.tensor(array))  # as memory of a device
    rows, engine, scored = rows_of(90, 20), TorchProducts("cpu"), []
    add = graph_products._DeviceScores.add
    monkeypatch.setattr(
        graph_products._DeviceScores, "add", lambda self, *block: (scored.append(block[1]), add(self, *block))[1]
    )
    with interpreted():
        table = rank_ring.build_on_ring(Communicator(), rows.copy(), 7, products=engine, memory_bytes=memory)
    np.testing.assert_array_equal(table.neighbours.reshape(90, 7), reference.nearest_neighbours(rows, 7))
    assert set(scored) == {0, 32, 64}


def test_a_recall_goes_on_from_its_saved_state() -> None:
    engine, rows = TorchProducts("cpu"), rows_of(90, 8)
    blocks = [engine.load(rows[at : at + 30], at) for at in (0, 30, 60)]
    whole, first, second = (engine.start(0, 90, 12) for _ in range(3))
    pairs = [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2)]
    for number, (a, b) in enumerate(pairs):
        whole.compare_inside(blocks[a], blocks[b])
        if number == 3:
            second.restore(first.arrays())
        (first if number < 3 else second).compare_inside(blocks[a], blocks[b])
    for mine, theirs in zip(second.candidates(), whole.candidates(), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_only_what_may_be_near_is_scored_exactly() -> None:
    engine, rows = TorchProducts("cpu"), np.random.default_rng(0).standard_normal((400, 64)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    recall, block = engine.start(0, 400, 48), engine.load(rows, 0)
    recall.compare_inside(block, block)
    everyone, some = recall.candidates(), recall.candidates(8, engine.error_bound(64))
    assert everyone.counts.tolist() == [48] * 400 and some.counts.min() >= 8 and some.counts.mean() < 10
    exact = rows.astype(np.float64) @ rows.astype(np.float64).T
    np.fill_diagonal(exact, -1)
    for row, (ids, count, floor) in enumerate(zip(some.ids, some.counts, some.floors, strict=True)):
        best = np.sort(exact[row])[::-1][:8]
        np.testing.assert_array_equal(np.sort(exact[row, ids[:count]])[::-1][:8], best)
        assert best[-1] > floor + engine.error_bound(64)  # so no row is redone for it


def test_only_half_precision_is_an_engine() -> None:
    with pytest.raises(InvalidArgument, match="float64"):
        TorchProducts("cpu", torch.float64)
