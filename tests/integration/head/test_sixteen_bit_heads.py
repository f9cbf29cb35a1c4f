"""A class head with rows of 16 bits learns what one of float32 learns, to the same bits wherever its rows are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import geartrain as gt
from geartrain.ams.client.table import Table
from geartrain.ams.values.specs import DTypeName

CLASSES, DIM, BATCH = 100, 16, 32


def samples(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Noisy features [count, DIM] around a center of each class, and labels."""
    centers = torch.nn.functional.normalize(torch.randn(CLASSES, DIM, generator=torch.Generator().manual_seed(0)))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    noise = 0.25 * torch.randn(count, DIM, generator=generator)
    return torch.nn.functional.normalize(centers[labels] + noise), labels


def head_of(cluster: Any, dtype: DTypeName, rows: str = "pull", sample_rate: float = 1.0) -> gt.ClassHead:
    return gt.ClassHead(
        cluster,
        "h",
        num_classes=CLASSES,
        dim=DIM,
        select=gt.FullSoftmax() if sample_rate == 1 else gt.PartialFC(sample_rate),
        margin=gt.CosFace(16, 0.0),
        optimizer=gt.SparseMomentum(lr=0.3, momentum=0.9, weight_decay=5e-4),
        initializer=gt.Normal(std=1.0),
        rows=rows,
        config=gt.HeadConfig(dtype=dtype, slot_dtype=dtype, seed=1),
    )


def train(head: gt.ClassHead, steps: range, of: int) -> None:
    """``steps`` of ``of`` steps, at whose end the learning rate is 0."""
    features, labels = samples(3_000, 1)
    rows = gt.RowOptimizer(head)
    for step in steps:
        batch = torch.randint(3_000, (BATCH,), generator=torch.Generator().manual_seed(step))
        rows.param_groups[0]["lr"] = 0.3 * (1 - step / of)
        head(features[batch], labels[batch]).backward()
        rows.step()
        rows.zero_grad()


def test_the_held_out_loss_of_bfloat16_rows_is_that_of_float32() -> None:
    """To the nearest, the last steps of a falling learning rate were lost, and with them a tenth of the loss."""
    features, labels = samples(3_000, 2)
    losses = {}
    for dtype in ("float32", "bfloat16"):
        with gt.local() as cluster:
            head = head_of(cluster, dtype)
            train(head, range(1_500), 1_500)
            head.eval()
            losses[dtype] = float(head(features, labels).detach())
    assert losses["float32"] < 2
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.01)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("sample_rate", [1.0, 0.2])
def test_rows_have_the_same_bits_in_every_place(dtype: DTypeName, sample_rate: float) -> None:
    found: dict[str, Tensor] = {}
    for name, rows, num_shards in (
        ("alone", "pull", 1),
        ("shards", "pull", 3),
        ("hosted", "hosted", 2),
        ("ranks", "ranks", 1),
    ):
        with gt.local(num_shards) as cluster:
            head = head_of(None if rows == "ranks" else cluster, dtype, rows, sample_rate)
            train(head, range(12), 12)
            found[name] = head.weights()
    assert torch.equal(found["alone"], found["shards"])
    # Their gradients are sums in another order, and do not travel in bfloat16: a few values are rounded otherwise.
    assert _alike(found["hosted"], found["ranks"]) > 0.99
    assert _alike(found["alone"], found["hosted"]) > (0.6 if dtype == "float16" else 0.9)


def _alike(one: Tensor, other: Tensor) -> float:
    return float((one == other).double().mean())


def push(table: Table, steps: range) -> Tensor:
    for step in steps:
        random = np.random.default_rng(step)
        ids = random.permutation(60)[: 1 + step % 30]  # at times none of some shard
        table.push(ids, random.standard_normal((len(ids), 5)).astype(np.float32))
    return torch.from_numpy(table.pull(np.arange(60)).astype(np.float32))


@pytest.mark.parametrize("optimizer", [gt.SparseMomentum(0.1, weight_decay=0.01), gt.Adam(0.01)], ids=repr)
def test_a_restored_table_goes_on_to_the_same_bits_on_other_shards(tmp_path: Path, optimizer: Any) -> None:
    slot_dtype: DTypeName = "bfloat16" if optimizer.takes_narrow_slots else "float32"
    with gt.local(2) as cluster:
        table = cluster.create_table("t", dim=5, optimizer=optimizer, dtype="bfloat16", slot_dtype=slot_dtype)
        push(table, range(40))
        cluster.snapshot(tmp_path, "middle").result()
        expected = push(table, range(40, 80))
    with gt.local(3) as cluster:
        cluster.restore(tmp_path / "middle")
        assert torch.equal(push(cluster.table("t"), range(40, 80)), expected)
