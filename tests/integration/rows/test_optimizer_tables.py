"""Every optimizer over every carrier: a cluster does what torch does, and a restored one goes on to the same bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.values.optimizers.registry import OPTIMIZERS
from geartrain.ams.values.specs import DTypeName
from geartrain.launch.hosting import local
from tests.support.torch_twins import TORCH_TWINS

NUM_ROWS, DIM = 900, 6
EVERYTHING = np.arange(NUM_ROWS)


def gradients_of(step: int) -> np.ndarray:
    return np.random.default_rng(step).standard_normal((NUM_ROWS, DIM)).astype(np.float32)


def train(cluster: Cluster, steps: range) -> None:
    for name in TORCH_TWINS:
        for step in steps:
            ids = np.flatnonzero(np.random.default_rng(step).random(NUM_ROWS) < 0.7)
            cluster.table(name).push(ids, gradients_of(step)[ids], lr=0.1 / (step + 1))


def test_every_optimizer_has_a_twin() -> None:
    assert TORCH_TWINS.keys() == OPTIMIZERS.keys()


@pytest.mark.parametrize("num_rows", [None, NUM_ROWS])
def test_pushes_follow_torch_in_float64(cluster: Cluster, num_rows: int | None) -> None:
    for name, (optimizer, of_torch) in TORCH_TWINS.items():
        table = cluster.create_table(name, dim=DIM, optimizer=optimizer, num_rows=num_rows)
        weights = torch.from_numpy(table.pull(EVERYTHING)).double().requires_grad_()
        reference = of_torch(weights)
        for step in range(6):
            table.push(EVERYTHING, gradients_of(step), lr=0.1 / (step + 1), scale=0.5)
            weights.grad = torch.from_numpy(gradients_of(step)).double() * 0.5
            reference.param_groups[0]["lr"] = 0.1 / (step + 1)
            reference.step()
        np.testing.assert_allclose(table.pull(EVERYTHING), weights.detach().numpy(), rtol=1e-5, atol=1e-5, err_msg=name)


def test_restored_tables_go_on_to_the_same_bits_on_any_number_of_shards(cluster: Cluster, tmp_path: Path) -> None:
    for name, (optimizer, _) in TORCH_TWINS.items():
        slot_dtype: DTypeName = "bfloat16" if optimizer.takes_narrow_slots else "float32"
        cluster.create_table(name, dim=DIM, optimizer=optimizer, dtype="bfloat16", slot_dtype=slot_dtype)
    train(cluster, range(4))
    cluster.snapshot(tmp_path, "full").result(60)
    train(cluster, range(4, 6))
    path = cluster.snapshot(tmp_path, "delta", parent="full").result(60)
    train(cluster, range(6, 9))
    for num_shards in (1, 3, 4):
        with local(num_shards) as other:
            other.restore(path)
            train(other, range(6, 9))
            for name in TORCH_TWINS:
                np.testing.assert_array_equal(
                    other.table(name).pull(EVERYTHING), cluster.table(name).pull(EVERYTHING), err_msg=name
                )
