"""Look-ups and updates of embeddings by kernels, in Triton's interpreter, against tensor operations in float64."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor

import geartrain as gt
from geartrain.ams.values.optimizers.registry import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Momentum,
    RowOptimizerSpec,
    RowWiseAdagrad,
    RowWiseAdam,
)
from geartrain.bridge.kernels import lookup
from geartrain.bridge.kernels.hashing import owners
from geartrain.bridge.kernels.launch import interpreted, launch
from geartrain.bridge.kernels.lookup import (
    Entries,
    FieldShape,
    RowSpan,
    SortedGradients,
    VectorGradients,
    index_fields,
    pool,
    row_gradients,
)
from geartrain.bridge.kernels.optimizers import RowStep, step_numbers, update_rows
from geartrain.bridge.kernels.rounding import ROW, SLOT, round_rows
from geartrain.bridge.kernels.row_update import RowArrays

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="kernels are given addresses, here the host's; on a GPU tests/integration/gpu/test_cuda_embeddings.py",
)

NUM_ROWS = [23, 7, 300]
FIELDS = [
    FieldShape(0, 24, 8, 3, "mean", 5),
    FieldShape(2, 30, 12, 0, "sum"),
    FieldShape(1, 7, 7, 1, "sqrtn", -1),
    FieldShape(0, 140, 9, 0, "sqrtn"),
]


def given(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ids of which some are hot, and padding; offsets with empty bags; weights."""
    rng = torch.Generator().manual_seed(seed)
    hot = (torch.rand(140, generator=rng) ** 6 * 23).long()
    ids = [
        torch.randint(23, (24,), generator=rng),
        torch.randint(300, (30,), generator=rng),
        torch.randint(-1, 7, (7,), generator=rng),
        hot,
    ]
    bounds = [
        torch.cat([torch.tensor([0, 0]), torch.randint(30, (10,), generator=rng).sort().values, torch.tensor([30])])
    ]
    bounds += [torch.tensor([0, 1, 1, 1, 90, 100, 101, 130, 130, 140])]
    return torch.cat(ids), torch.cat(bounds), torch.rand(201, generator=rng)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("dim", "weighted"), [(5, True), (16, False), (40, True)])
def test_bags_of_all_fields_are_pooled_as_in_tensor_operations(dtype: torch.dtype, dim: int, weighted: bool) -> None:
    ids, offsets, weights = given(dim)
    rng = torch.Generator().manual_seed(dim)
    widths = (dim, 2 * dim, dim)
    tables = [
        RowSpan(torch.randn(num, wide, generator=rng).to(dtype), 0) for num, wide in zip(NUM_ROWS, widths, strict=True)
    ]
    made = [index_fields(FIELDS, ids, offsets, weights if weighted else None, NUM_ROWS)]
    with interpreted():
        made.append(index_fields(FIELDS, ids, offsets, weights if weighted else None, NUM_ROWS))
        found = pool(made[1][0], tables)
    for name in ("key_N", "place_N", "bounds_V", "factor_V"):
        wanted, got = (getattr(entries, name) for entries, _ in made)
        torch.testing.assert_close(got, wanted, msg=lambda text, name=name: f"{name}: {text}")
    assert [int(status) for _, status in made] == [0, 0]
    wide = [RowSpan(table.rows_LD.double(), 0) for table in tables]
    for got, wanted in zip(found, pool(made[0][0], wide), strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(("place", "value", "kind"), [(40, 300, 1), (45, -1, 1), (None, None, 2), (None, None, 3)])
def test_what_is_wrong_is_found_and_left_out(place: int | None, value: Any, kind: int) -> None:
    ids, offsets, weights = given(0)
    if place is not None:
        ids[place] = value
    elif kind == 2:
        offsets[3], offsets[4] = 30, 0
    else:
        weights[30] = torch.inf
    wanted = index_fields(FIELDS, ids, offsets, weights, NUM_ROWS)
    with interpreted():
        found = index_fields(FIELDS, ids, offsets, weights, NUM_ROWS)
    assert int(found[1]) == int(wanted[1]) == (4 - 1) * 4 + kind  # of the second field
    assert torch.equal(found[0].key_N, wanted[0].key_N)


def test_ids_without_a_bound_are_in_keys_by_their_ranks() -> None:
    ids, offsets, _ = given(0)
    ids[24:54] = torch.randint(2**63 - 1, (30,))
    ids[[30, 31]] = torch.tensor([2**63 - 1, -7])
    rows = [23, 7, None]
    wanted, status = index_fields(FIELDS, ids, offsets, None, rows, 5)
    with interpreted():
        found, kernel_status = index_fields(FIELDS, ids, offsets, None, rows, 5)
    assert torch.equal(found.key_N, wanted.key_N) and int(kernel_status) == int(status) == 3 * 4 + 1
    sound = torch.cat([ids[24:31], ids[32:54]])
    assert (found.key_N[24:54][ids[24:54] >= 0] - (2 << found.bits)).tolist() == owners(sound, 5).tolist()
    assert found.ids_N is not None and torch.equal(found.ids_N, ids)


def entries_of(seed: int, weighted: bool = True) -> Entries:
    ids, offsets, weights = given(seed)
    return index_fields(FIELDS, ids, offsets, weights if weighted else None, NUM_ROWS)[0]


def upstream_of(entries: Entries, dim: int, seed: int) -> list[Tensor | None]:
    """Parts of one wide matrix, as the gradient of torch.cat is; one field has none."""
    rng = torch.Generator().manual_seed(seed)
    wide = torch.randn(12, 4 * dim, generator=rng)
    found: list[Tensor | None] = [
        wide[: piece.num_vectors, number * dim : (number + 1) * dim] for number, piece in enumerate(entries.pieces)
    ]
    found[2] = None
    return found


@pytest.mark.parametrize("bad", [None, torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_in_any_gradient_is_found(bad: float | None) -> None:
    wide = torch.full((40, 70), 3e38)  # whose sum is not finite in float32
    parts = [wide[:, :3], wide[:17, 9:40], torch.ones(()).expand(5, 4), wide.t()[60:], torch.empty(0, 8)]
    if bad is not None:
        wide[39, 69] = bad
    assert bool(lookup.checksum(parts).isfinite()) == (bad is None)
    with interpreted():
        assert bool(lookup.checksum(parts).isfinite()) == (bad is None)


def stored(rows: Tensor, slots: Tensor | None, updates: Tensor | None, refused: Tensor, key: int) -> RowArrays:
    return RowArrays(rows_LD=rows, slots_LS=slots, updates_L=updates, refused=refused, first=0, key=key)


OPTIMIZERS: list[tuple[RowOptimizerSpec, torch.dtype, torch.dtype]] = [
    (SGD(0.5, weight_decay=0.01), torch.float32, torch.float32),
    (Momentum(0.1, momentum=0.9, nesterov=True), torch.float32, torch.float32),
    (Adagrad(0.5, lr_decay=0.1), torch.float32, torch.float32),
    (Adagrad(0.5), torch.float16, torch.float16),
    (RowWiseAdagrad(0.5), torch.bfloat16, torch.float32),
    (Adam(0.1, weight_decay=0.1), torch.float32, torch.float32),
    (AdamW(0.1, weight_decay=0.1), torch.bfloat16, torch.bfloat16),
    (RowWiseAdam(0.1), torch.float16, torch.float32),
]


@pytest.mark.parametrize("number", range(len(OPTIMIZERS)))
def test_rows_are_updated_once_by_the_sum_of_their_gradients(number: int) -> None:
    """Two micro-batches over three tables; a hot id goes through many blocks. 16 bits: the same draws, so at most
    where a float32 sum differs in its last bit do they differ."""
    optimizer, dtype, slot_dtype = OPTIMIZERS[number]
    dim, rng = (5 if number == 1 else 16 if number == 2 else 8), torch.Generator().manual_seed(number)
    slots, key = optimizer.slot_dim(dim), 2**63 + 77
    parts = [
        VectorGradients(own := entries_of(seed), upstream_of(own, dim, seed), scale)
        for seed, scale in ((1, 0.5), (2, 1.5))
    ]
    made: list[RowArrays] = []
    for rows in NUM_ROWS:
        values = torch.randn(rows, dim, generator=rng).to(dtype)
        held = torch.rand(rows, slots, generator=rng).to(slot_dtype) if slots else None
        steps = torch.randint(5, (rows,), generator=rng)
        counts = steps if dtype != torch.float32 or optimizer.counts_updates else None
        made.append(stored(values, held, counts, torch.zeros((), dtype=torch.int64), key))
    wanted = [expected(table, index, parts, optimizer) for index, table in enumerate(made)]
    numbers = step_numbers(optimizer)
    assert numbers is not None
    with interpreted():
        gradients = SortedGradients(parts)
        norm = gradients.squares({index: table.rows_LD for index, table in enumerate(made)})
        gradients.update(dict(enumerate(made)), numbers, optimizer.lr, torch.tensor(0.25))
    torch.testing.assert_close(norm, sum(squares for *_, squares in wanted), rtol=1e-5, atol=0)
    for table, (rows_LD, slots_LS, steps_L, _) in zip(made, wanted, strict=True):
        close(table.rows_LD, rows_LD)
        if table.slots_LS is not None:
            close(table.slots_LS, slots_LS)
        assert table.updates_L is None or torch.equal(table.updates_L, steps_L)
        assert int(table.refused) == 0


def expected(
    table: RowArrays, index: int, parts: list[VectorGradients], optimizer: RowOptimizerSpec
) -> tuple[Any, ...]:
    """What float64 makes of it, rounded by the reference; and Σ g²."""
    sums = torch.zeros(*table.rows_LD.shape, dtype=torch.float64)
    is_touched = torch.zeros(len(sums), dtype=torch.bool)
    for part in parts:
        plain = [RowSpan(torch.empty(num, sums.shape[1]), 0) for num in NUM_ROWS]
        used = part.entries.of(torch.tensor([own is not None for own in part.upstream]))
        numbers, gradient = row_gradients(used, plain, part.upstream, part.scale)[index]
        sums.index_add_(0, numbers, gradient.double())
        is_touched[numbers] = True
    # What only a field without a gradient asks for has the gradient 0 here; to leave it out is the caller's.
    for part in parts:
        numbers = row_gradients(part.entries, plain, part.upstream)[index][0]
        is_touched[numbers] = True
    at = is_touched.nonzero().squeeze(1)
    rows, steps = table.rows_LD[at].double(), None if table.updates_L is None else table.updates_L[at] + 1
    slots = None if table.slots_LS is None else table.slots_LS[at].double()
    update_rows(optimizer, RowStep(rows, slots, sums[at] * 0.25, optimizer.lr, steps))
    done = table.rows_LD.clone(), None if slots is None else table.slots_LS.clone(), table.updates_L  # type: ignore[union-attr]

    def narrow(values: Tensor, dtype: torch.dtype, part: int) -> Tensor:
        if steps is None:
            return values.to(dtype)
        return round_rows(values, dtype, key=table.key, ids_N=at, numbers_N=steps, part=part)

    done[0][at] = narrow(rows, done[0].dtype, ROW)
    if slots is not None and done[1] is not None:
        done[1][at] = narrow(slots, done[1].dtype, SLOT)
    counted = None if table.updates_L is None else table.updates_L.clone()
    if counted is not None and steps is not None:
        counted[at] = steps
    return done[0], done[1], counted, sums.square().sum()


def close(found: Tensor, wanted: Tensor) -> None:
    if found.dtype == torch.float32:
        torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-6)
        return
    is_same = found == wanted
    assert float(is_same.float().mean()) > 0.99
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-3)


def test_a_row_that_leaves_its_type_stays_and_is_counted() -> None:
    entries, _ = index_fields([FieldShape(0, 3, 3, 1)], torch.tensor([2, 4, 2]), None, None, [6])
    rows = torch.ones(6, 8, dtype=torch.float16)
    steps, refused = torch.zeros(6, dtype=torch.int64), torch.zeros((), dtype=torch.int64)
    upstream = torch.tensor([[1e6], [1.0], [2.0]]).expand(3, 8).contiguous()
    with interpreted():
        gradients = SortedGradients([VectorGradients(entries, [upstream])])
        numbers = step_numbers(SGD(1.0))
        assert numbers is not None
        gradients.update({0: stored(rows, None, steps, refused, 1)}, numbers, 1.0, torch.ones(()))
    assert rows[:, 0].tolist() == [1, 1, 1, 1, 0, 1]
    assert (steps.tolist(), int(refused)) == ([0, 0, 0, 0, 1, 0], 1)


def test_ids_without_any_bag_are_found() -> None:
    for inside in (contextlib.nullcontext, interpreted):
        with inside():
            _, status = index_fields([FieldShape(0, 3, 0, 0)], torch.arange(3), torch.zeros(1).long(), None, [4])
        assert int(status) == 4 + 2


def test_a_gradient_whose_square_is_beyond_float32_is_finite() -> None:
    with interpreted():
        table = gt.Embedding(None, "t", 2, num_rows=4, rows="ranks", optimizer=gt.SGD(1e-20))
        before = table.table("t").pull(torch.arange(4))
        (table(torch.tensor([1])) * 1e20).sum().backward()
        gt.RowOptimizer(table).step()
        torch.testing.assert_close(before[1] - table.table("t").pull(torch.tensor([1]))[0], torch.ones(2))


def test_more_pieces_than_a_grid_takes_are_pooled(monkeypatch: pytest.MonkeyPatch) -> None:
    entries, tables = entries_of(0), [RowSpan(torch.randn(num, 5), 0) for num in NUM_ROWS]
    wanted, grids = pool(entries, tables), []

    def noted(kernel: Any, grid: tuple[int, ...], *args: Any, **more: Any) -> None:
        grids.append(grid)
        launch(kernel, grid, *args, **more)

    monkeypatch.setattr(lookup, "launch", noted)
    monkeypatch.setattr(lookup, "_PIECES", 3, raising=False)
    with interpreted():
        for found, own in zip(pool(entries, tables), wanted, strict=True):
            torch.testing.assert_close(found, own, rtol=2e-6, atol=2e-6)
    assert [grid[1] for grid in grids] == [3, 1]
