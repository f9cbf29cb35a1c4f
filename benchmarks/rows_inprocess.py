"""Pull and push of random rows inside one process, against torch on a plain tensor of the same rows.

One thread, 2M rows of 128 float32 values (bfloat16 in cases that say so) in a hashed table, each call with fresh ids;
the figures are medians. Two timings, with the same targets: in turns (16 calls of a side, of which the last 12 count:
its own caches) and call by call (A B C D A B C D …: each call finds the caches as another side left them). The rival is
the fastest torch form found, its outputs allocated beforehand.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import numpy as np
import torch
from _common import median_seconds, result, threads

from geartrain.ams.kernels import ops
from geartrain.ams.tables.row_table import RowTable
from geartrain.ams.values.optimizers.registry import SparseMomentum
from geartrain.ams.values.specs import Ids, TableSpec
from geartrain.launch.bench import Result

NUM_ROWS = 2_000_000
DIM = 128
LR, MOMENTUM = 0.1, 0.9
FILL_BATCH = 100_000
TIMINGS = {16: "in turns", 1: "call by call"}
"""By the calls of a turn."""
Sample = tuple[Ids, torch.Tensor]
Side = Callable[[Sample], object]


@functools.cache
def row_ids() -> Ids:
    """The ids of the table: any int64, as a hashed table sees them. The rival holds row i at place i."""
    return np.unique((ops.splitmix64(np.arange(NUM_ROWS)) >> np.uint64(1)).astype(np.int64))


@functools.cache
def tables() -> tuple[RowTable, torch.Tensor, torch.Tensor]:
    """A filled table, and the rival's rows and momentum."""
    spec = TableSpec(name="bench", dim=DIM, optimizer=SparseMomentum(lr=LR, momentum=MOMENTUM))
    table = RowTable(spec, np.arange(ops.NUM_BUCKETS))
    rows = torch.empty(NUM_ROWS, DIM)
    for begin in range(0, NUM_ROWS, FILL_BATCH):
        part = rows[begin : begin + FILL_BATCH].normal_(0, 0.01)
        table.assign(row_ids()[begin : begin + FILL_BATCH], part.numpy())
    # Written, not only zero: else its pages would first come into being while somebody is timed.
    return table, rows, torch.empty(NUM_ROWS, DIM).zero_()


def one_thread(measure: Callable[[int, int], Result]) -> Callable[[int, int], Result]:
    """Run a measurement with torch on one thread, as the tables are."""

    @functools.wraps(measure)
    def run(num_ids: int, calls: int) -> Result:
        with threads(1):
            return measure(num_ids, calls)

    return run


@one_thread
def measure_pull(num_ids: int, calls: int) -> Result:
    """``RowTable.pull`` of random distinct rows against ``torch.index_select(..., out=)``."""
    table, rows, _ = tables()
    generator = np.random.default_rng(1)
    out, out_torch = np.empty((num_ids, DIM), np.float32), torch.empty(num_ids, DIM)

    def draw() -> Sample:
        places = generator.integers(0, NUM_ROWS, num_ids)
        return row_ids()[places], torch.from_numpy(places)

    sides: list[Side] = [
        lambda sample: table.pull(sample[0], out),
        lambda sample: torch.index_select(rows, 0, sample[1], out=out_torch),
    ]
    ours, theirs = _medians(sides, draw, num_ids, calls)
    return _result(f"pull {num_ids} rows, {TIMINGS[calls]}", ours, "torch.index_select", theirs, 1.5)


@one_thread
def measure_push(num_ids: int, calls: int) -> Result:
    """``RowTable.push`` with SparseMomentum against the best of two torch chains."""
    table, rows, velocities = tables()
    generator = np.random.default_rng(2)
    gradients = torch.randn(num_ids, DIM, generator=torch.Generator().manual_seed(3)) * 1e-3
    buffer = torch.empty(num_ids, DIM)

    def draw() -> Sample:
        places = np.unique(generator.integers(0, NUM_ROWS, num_ids + num_ids // 8))
        places = generator.permutation(places)[:num_ids]
        return row_ids()[places], torch.from_numpy(places)

    def select_copy_add(sample: Sample) -> None:
        torch.index_select(velocities, 0, sample[1], out=buffer)
        buffer.mul_(MOMENTUM).add_(gradients)
        velocities.index_copy_(0, sample[1], buffer)
        rows.index_add_(0, sample[1], buffer, alpha=-LR)

    def select_copy_copy(sample: Sample) -> None:
        torch.index_select(velocities, 0, sample[1], out=buffer)
        buffer.mul_(MOMENTUM).add_(gradients)
        velocities.index_copy_(0, sample[1], buffer)
        rows.index_copy_(0, sample[1], torch.index_select(rows, 0, sample[1]).add_(buffer, alpha=-LR))

    gradient_rows = gradients.numpy()
    chains = {
        "index_select, index_copy_, index_add_": select_copy_add,
        "index_select twice, index_copy_ twice": select_copy_copy,
    }
    sides: list[Side] = [lambda sample: table.push(sample[0], gradient_rows), *chains.values()]
    ours, *theirs = _medians(sides, draw, num_ids, calls)
    best, name = min(zip(theirs, chains, strict=True))
    return _result(f"SparseMomentum push {num_ids} rows, {TIMINGS[calls]}", ours, f"torch {name}", best, 4.0)


@functools.cache
def half_tables() -> tuple[RowTable, torch.Tensor, torch.Tensor]:
    """A filled table of bfloat16 rows and momentum, and the rival's."""
    spec = TableSpec(
        name="bench",
        dim=DIM,
        optimizer=SparseMomentum(lr=LR, momentum=MOMENTUM),
        dtype="bfloat16",
        slot_dtype="bfloat16",
    )
    table = RowTable(spec, np.arange(ops.NUM_BUCKETS))
    for begin in range(0, NUM_ROWS, FILL_BATCH):
        ids = row_ids()[begin : begin + FILL_BATCH]
        table.push(ids, np.zeros((len(ids), DIM), np.float32))
    rows = torch.empty(NUM_ROWS, DIM, dtype=torch.bfloat16).normal_(0, 0.01)
    return table, rows, torch.empty_like(rows).zero_()


@one_thread
def measure_half_push(num_ids: int, calls: int) -> Result:
    """``RowTable.push`` to bfloat16 rows, rounded by chance, against torch, which rounds to the nearest."""
    table, rows, velocities = half_tables()
    generator = np.random.default_rng(4)
    gradients = torch.randn(num_ids, DIM, generator=torch.Generator().manual_seed(5)) * 1e-3

    def draw() -> Sample:
        places = generator.choice(NUM_ROWS, num_ids, replace=False)
        return row_ids()[places], torch.from_numpy(places)

    def in_float32(sample: Sample) -> None:
        moved = velocities[sample[1]].float().mul_(MOMENTUM).add_(gradients)
        velocities.index_copy_(0, sample[1], moved.bfloat16())
        rows.index_copy_(0, sample[1], rows[sample[1]].float().add_(moved, alpha=-LR).bfloat16())

    gradient_rows = gradients.numpy()
    sides: list[Side] = [lambda sample: table.push(sample[0], gradient_rows), in_float32]
    ours, theirs = _medians(sides, draw, num_ids, calls)
    case = f"SparseMomentum push {num_ids} rows, {TIMINGS[calls]}"
    return _result(case, ours, "torch in float32, stored to the nearest", theirs, 2.0, dtype="bf16")


def _medians(sides: list[Side], draw: Callable[[], Sample], num_ids: int, calls: int) -> list[float]:
    rounds = max(2, 100_000 // num_ids) * (16 // calls)
    return median_seconds(sides, draw, rounds=rounds, calls=calls, uncounted=calls // 4)


def _result(case: str, ours: float, rival: str, theirs: float, target: float, dtype: str = "fp32") -> Result:
    case = f"{case}, D={DIM} {dtype}, {NUM_ROWS} rows, hashed, 1 thread"
    return result(case, ours * 1e3, rival, theirs * 1e3, "ms", target=target)


def results(full: bool = False) -> Iterator[Result]:  # noqa: ARG001
    """Yield the in-process cases of ``geartrain bench rows``."""
    for measure in (measure_pull, measure_push):
        for num_ids in (10_000, 100_000):
            for calls in TIMINGS:
                yield measure(num_ids, calls)
    for num_ids in (10_000, 100_000):
        yield measure_half_push(num_ids, 16)
