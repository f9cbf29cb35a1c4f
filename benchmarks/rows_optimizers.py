"""A push by each optimizer of sparse features inside one process, against torch on a plain tensor of the same rows.

One thread, 1M rows of 16 float32 values in a hashed table, 20,000 distinct random ids a call; the figures are medians,
in turns of 16 calls of which the last 12 count. The rival is torch's own optimizer over a sparse gradient that is
coalesced already where there is one, else the formula in torch's operations on the rows of the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from _common import median_seconds, result, threads

from geartrain.ams.kernels import ops
from geartrain.ams.tables.row_table import RowTable
from geartrain.ams.values.optimizers.registry import (
    FTRL,
    Adagrad,
    Adam,
    RMSProp,
    RowOptimizerSpec,
    RowWiseAdagrad,
    RowWiseAdam,
)
from geartrain.ams.values.specs import Ids, TableSpec
from geartrain.launch.bench import Result

NUM_ROWS, DIM, NUM_IDS, ROUNDS = 1_000_000, 16, 20_000, 6
LR, EPS = 0.05, 1e-8
Push = Callable[[torch.Tensor, torch.Tensor], None]
"""Of gradients [N, D] to the rows at places [N]."""


def _of_torch(make: Callable[[torch.Tensor], torch.optim.Optimizer], rows: torch.Tensor) -> Push:
    weights = rows.clone().requires_grad_()
    optimizer = make(weights)

    def push(places: torch.Tensor, gradients: torch.Tensor) -> None:
        weights.grad = torch.sparse_coo_tensor(
            places.unsqueeze(0), gradients, weights.shape, is_coalesced=True, check_invariants=False
        )
        optimizer.step()

    return push


def _adagrad(rows: torch.Tensor) -> Push:
    return _of_torch(lambda weights: torch.optim.Adagrad([weights], LR), rows)


def _adam(rows: torch.Tensor) -> Push:
    return _of_torch(lambda weights: torch.optim.SparseAdam([weights], LR), rows)


def _rowwise_adagrad(rows: torch.Tensor) -> Push:
    weights, total = rows.clone(), torch.zeros(NUM_ROWS)

    def push(places: torch.Tensor, gradients: torch.Tensor) -> None:
        total.index_add_(0, places, gradients.square().mean(1))
        rate = total[places].sqrt_().add_(EPS).reciprocal_()
        weights.index_add_(0, places, gradients * rate.unsqueeze(1), alpha=-LR)

    return push


def _rowwise_adam(rows: torch.Tensor) -> Push:
    weights, first, second, updates = rows.clone(), torch.zeros_like(rows), torch.zeros(NUM_ROWS), torch.zeros(NUM_ROWS)

    def push(places: torch.Tensor, gradients: torch.Tensor) -> None:
        updates.index_add_(0, places, torch.ones(len(places)))
        t = updates[places]
        moment = first[places].mul_(0.9).add_(gradients, alpha=0.1)
        square = second[places].mul_(0.999).add_(gradients.square().mean(1), alpha=0.001)
        first.index_copy_(0, places, moment)
        second.index_copy_(0, places, square)
        rate = (square / (1 - 0.999**t)).sqrt_().add_(EPS).mul_(1 - 0.9**t).reciprocal_()
        weights.index_add_(0, places, moment.mul_(rate.unsqueeze(1)), alpha=-LR)

    return push


def _rmsprop(rows: torch.Tensor) -> Push:
    weights, average = rows.clone(), torch.zeros_like(rows)

    def push(places: torch.Tensor, gradients: torch.Tensor) -> None:
        square = average[places].mul_(0.99).addcmul_(gradients, gradients, value=0.01)
        average.index_copy_(0, places, square)
        weights.index_add_(0, places, gradients / square.sqrt_().add_(EPS), alpha=-LR)

    return push


def _ftrl(rows: torch.Tensor) -> Push:
    weights, z, n = rows.clone(), torch.zeros_like(rows), torch.zeros_like(rows)

    def push(places: torch.Tensor, gradients: torch.Tensor) -> None:
        before, moved = n[places], z[places]
        after = torch.addcmul(before, gradients, gradients)
        root = after.sqrt()
        sigma = root.sub(before.sqrt_()).div_(LR)
        moved.add_(gradients).addcmul_(sigma, weights[places], value=-1)
        n.index_copy_(0, places, after)
        z.index_copy_(0, places, moved)
        weights.index_copy_(
            0, places, torch.nn.functional.softshrink(moved, 1e-3).neg_().div_(root.add_(1).div_(LR).add_(1e-3))
        )

    return push


CASES: list[tuple[RowOptimizerSpec, str, Callable[[torch.Tensor], Push], float]] = [
    (Adagrad(LR), "torch.optim.Adagrad, sparse gradient", _adagrad, 3.0),
    (Adam(LR), "torch.optim.SparseAdam", _adam, 3.0),
    (RowWiseAdagrad(LR), "torch operations", _rowwise_adagrad, 1.5),
    (RowWiseAdam(LR), "torch operations", _rowwise_adam, 2.0),
    (RMSProp(LR), "torch operations", _rmsprop, 3.0),
    (FTRL(LR, l1=1e-3, l2=1e-3), "torch operations", _ftrl, 3.0),
]
"""With the rival, and how many times as long it should take."""


def _filled(optimizer: RowOptimizerSpec, ids: Ids, rows: torch.Tensor) -> RowTable:
    table = RowTable(TableSpec(name="bench", dim=DIM, optimizer=optimizer), np.arange(ops.NUM_BUCKETS))
    table.assign(ids, rows.numpy())
    return table


def results(full: bool = False) -> Iterator[Result]:  # noqa: ARG001
    """Yield the cases of ``geartrain bench rows_optimizers``."""
    with threads(1):
        yield from _results()


def _results() -> Iterator[Result]:
    ids = (ops.splitmix64(np.arange(NUM_ROWS)) >> np.uint64(1)).astype(np.int64)
    rows = torch.randn(NUM_ROWS, DIM, generator=torch.Generator().manual_seed(1)) * 0.01
    gradients = torch.randn(NUM_IDS, DIM, generator=torch.Generator().manual_seed(2)) * 1e-3
    generator = np.random.default_rng(3)

    def draw() -> tuple[Ids, torch.Tensor]:
        places = np.sort(generator.choice(NUM_ROWS, NUM_IDS, replace=False, shuffle=False))
        return ids[places], torch.from_numpy(places)

    for optimizer, rival, make, target in CASES:
        table, push = _filled(optimizer, ids, rows), make(rows)
        ours, theirs = median_seconds(
            [
                lambda sample, table=table: table.push(sample[0], gradients.numpy()),
                lambda sample, push=push: push(sample[1], gradients),
            ],
            draw,
            rounds=ROUNDS,
        )
        case = f"{type(optimizer).__name__} push {NUM_IDS} rows, D={DIM} fp32, {NUM_ROWS} rows, hashed, 1 thread"
        yield result(case, ours * 1e3, rival, theirs * 1e3, "ms", target=target)
