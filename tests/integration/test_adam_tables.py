"""Adam over every carrier: a cluster does what torch.optim.Adam does, and a restored one goes on to the same bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from geartrain.ams.client.cluster import Cluster, local
from geartrain.ams.values.optimizers.registry import Adam

NUM_ROWS, DIM = 900, 6
EVERYTHING = np.arange(NUM_ROWS)
OPTIMIZER = Adam(0.05, (0.8, 0.99), 1e-6, weight_decay=0.01)


def gradients_of(step: int) -> np.ndarray:
    return np.random.default_rng(step).standard_normal((NUM_ROWS, DIM)).astype(np.float32)


def train(cluster: Cluster, steps: range) -> None:
    for step in steps:
        ids = np.flatnonzero(np.random.default_rng(step).random(NUM_ROWS) < 0.7)
        cluster.table("t").push(ids, gradients_of(step)[ids], lr=0.1 / (step + 1))


@pytest.mark.parametrize("num_rows", [None, NUM_ROWS])
def test_pushes_follow_torch_in_float64(cluster: Cluster, num_rows: int | None) -> None:
    table = cluster.create_table("t", dim=DIM, optimizer=OPTIMIZER, num_rows=num_rows)
    weights = torch.from_numpy(table.pull(EVERYTHING)).double().requires_grad_()
    reference = torch.optim.Adam([weights], betas=OPTIMIZER.betas, eps=OPTIMIZER.eps, weight_decay=0.01)
    for step in range(6):
        table.push(EVERYTHING, gradients_of(step), lr=0.1 / (step + 1), scale=0.5)
        weights.grad = torch.from_numpy(gradients_of(step)).double() * 0.5
        reference.param_groups[0]["lr"] = 0.1 / (step + 1)
        reference.step()
    np.testing.assert_allclose(table.pull(EVERYTHING), weights.detach().numpy(), rtol=1e-5, atol=1e-5)


def test_a_restored_table_goes_on_to_the_same_bits_on_any_number_of_shards(cluster: Cluster, tmp_path: Path) -> None:
    cluster.create_table("t", dim=DIM, optimizer=OPTIMIZER, dtype="bfloat16")
    train(cluster, range(4))
    cluster.snapshot(tmp_path, "full").result(60)
    train(cluster, range(4, 6))
    path = cluster.snapshot(tmp_path, "delta", parent="full").result(60)
    train(cluster, range(6, 9))
    at_end = cluster.table("t").pull(EVERYTHING)
    for num_shards in (1, 3, 4):
        with local(num_shards) as other:
            other.restore(path)
            train(other, range(6, 9))
            np.testing.assert_array_equal(other.table("t").pull(EVERYTHING), at_end)
