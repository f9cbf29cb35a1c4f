"""Ranks that train one head: what two processes push is what one worker with the joint batch pushes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from geartrain.ams.programs.selection import PartialFC
from geartrain.ams.values.specs import Normal
from geartrain.bridge.head.class_head import ClassHead
from geartrain.bridge.head.loss.config import HeadConfig
from geartrain.bridge.head.loss.margins.angular import ArcFace, CosFace
from geartrain.bridge.placements.device_rows import DeviceRows
from geartrain.bridge.rows.optimizer import RowOptimizer
from tests.support.rank_processes import run_ranks
from tests.support.reference import UNIT_SGD, FakeCluster, FakeTable, merged_gradient

STEPS = 2
SHARES = {0: slice(0, 9), 1: slice(9, 14)}


def make_head(*, sync: bool) -> tuple[ClassHead, FakeTable]:
    cluster = FakeCluster()
    head = ClassHead(
        cluster,
        "classes",
        num_classes=80,
        dim=6,
        select=PartialFC(0.3),
        margin=CosFace(8, 0.2),
        optimizer=UNIT_SGD,
        sync=sync,
    )
    return head, cluster.tables["classes"]


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(14, 6, generator=generator), torch.randint(80, (14,), generator=generator)


def train_one_rank(rank: int, folder: Path) -> None:
    head, table = make_head(sync=True)
    rows, scaler = RowOptimizer(head), torch.amp.GradScaler("cpu", init_scale=4.0)
    start = table.rows.copy()
    for step in range(STEPS):
        features, labels = batch(step)
        share = SHARES[rank] if step == 0 else [slice(0, 14), slice(0, 0)][rank]
        scaler.scale(head(features[share].requires_grad_(), labels[share])).backward()
        scaler.step(rows)
        scaler.update()
        rows.zero_grad()
        table.rows[:] = start  # the fake knows no groups, so every step starts from the same rows
    # One rank's gradient overflows: neither may push, or the other would wait for it.
    features, labels = batch(9)
    loss = head(features, labels)
    (loss * (float("inf") if rank == 1 else 1.0)).backward()
    assert not torch.isfinite(head.row_update.carrier.grad).all()
    # So it is with one rank's features: were they refused there, the other would wait in the next collective.
    rows.zero_grad()
    if rank == 1:
        features[3, 2] = float("nan")
    head(features, labels).backward()
    assert not torch.isfinite(head.row_update.carrier.grad).all()
    groups = [push.group for push in table.pushes]
    np.savez(
        f"{folder}/rank{rank}.npz",
        ids=np.stack([push.ids for push in table.pushes]),
        gradients=np.stack([push.scale * push.gradients for push in table.pushes]),
        samples=[group.sample_count for group in groups if group is not None],
        sequences=[group.sequence for group in groups if group is not None],
        ranks=[group.rank for group in groups if group is not None],
        jobs=[group.job for group in groups if group is not None],
    )


def test_two_ranks_push_what_one_worker_would(tmp_path: Path) -> None:
    run_ranks(train_one_rank, 2, tmp_path)
    pushed = [np.load(tmp_path / f"rank{rank}.npz") for rank in range(2)]
    assert [part["samples"].tolist() for part in pushed] == [[1, 1], [1, 1]]
    assert [part["sequences"].tolist() for part in pushed] == [[1, 2], [1, 2]]
    assert [set(part["ranks"].tolist()) for part in pushed] == [{0}, {1}]
    assert len({job for part in pushed for job in part["jobs"].tolist()}) == 1
    np.testing.assert_array_equal(pushed[0]["ids"], pushed[1]["ids"])

    head, table = make_head(sync=False)
    rows, start = RowOptimizer(head), table.rows.copy()
    for step in range(STEPS):
        table.pushes.clear()
        head(*batch(step)).backward()
        rows.step()
        rows.zero_grad()
        table.rows[:] = start
        joint = np.zeros(table.rows.shape)
        for part in pushed:
            joint[part["ids"][step]] += part["samples"][step] / 2 * part["gradients"][step]
        np.testing.assert_allclose(joint, merged_gradient(table), rtol=0, atol=1e-6 * np.abs(joint).max())


def change_with_unequal_losses(rank: int, folder: Path) -> None:
    for name, kept_bytes in (("kept", None), ("made again", 0)):
        head = ClassHead(
            None,
            "classes",
            num_classes=8000,
            dim=6,
            select=PartialFC(0.1),
            margin=ArcFace(scale=64),
            optimizer=UNIT_SGD,
            initializer=Normal(),
            rows="ranks",
            config=HeadConfig(logits_cache_bytes=kept_bytes),
        )
        assert isinstance(head.table, DeviceRows)
        before = head.table.rows_LD.clone()
        features, labels = batch(rank)
        (head(features.requires_grad_(), labels) * (1 + rank)).backward()
        RowOptimizer(head).step()
        np.save(f"{folder}/{name}{rank}.npy", (head.table.rows_LD - before).numpy())


def test_logits_kept_by_one_pass_are_not_taken_for_those_of_another(tmp_path: Path) -> None:
    run_ranks(change_with_unequal_losses, 2, tmp_path)  # losses that weigh unequally are another pass's affair
    for rank in range(2):
        kept, made = (np.load(tmp_path / f"{name}{rank}.npy") for name in ("kept", "made again"))
        assert np.abs(made).max() > 1e-4
        np.testing.assert_allclose(kept, made, rtol=0, atol=1e-6 * np.abs(made).max())
