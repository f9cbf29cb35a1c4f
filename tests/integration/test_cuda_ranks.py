"""Class rows on a CUDA device, and graphs by its products. Skipped where there is none; ``make gpu-check`` runs it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import geartrain as gt
from geartrain.ams.graph.builder import ArrayRows, build_neighbours
from geartrain.bridge.graph_products import TorchProducts

pytestmark = pytest.mark.cuda

CLASSES, DIM, BATCH, STEPS = 3_000, 64, 32, 5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_of_a_device_keep_their_bound_and_give_the_exact_graph(dtype: torch.dtype) -> None:
    rows = np.random.default_rng(1).standard_normal((CLASSES, DIM)).astype(np.float32)
    rows[1::9] = rows[0::9][: len(rows[1::9])]
    engine = TorchProducts("cuda", dtype)
    unit = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    block = engine.load(unit, 0)
    true = unit.astype(np.float64) @ unit.astype(np.float64).T
    assert np.abs(engine.scores(block.rows_ND, block.rows_ND).cpu().numpy() - true).max() <= engine.error_bound(DIM)
    found, expected = (build_neighbours(ArrayRows(rows), 9, products=products) for products in (engine, None))
    np.testing.assert_array_equal(found.neighbours, expected.neighbours)


def trained(device: str, folder: Path) -> tuple[list[float], torch.Tensor]:
    """Losses, before and after a restore, and the rows after them."""

    def head_of() -> gt.ClassHead:
        return gt.ClassHead(
            None,
            "t",
            num_classes=CLASSES,
            dim=DIM,
            select=gt.KNNSoftmax(active=0.2, k=8, rebuild=3),
            margin=gt.ArcFace(scale=16, margin=0.2),
            initializer=gt.Normal(std=1.0),
            rows="ranks",
        ).to(device)

    head, losses = head_of(), []
    for step in range(STEPS):
        if step == 3:
            path = head.snapshot(folder, device)
            head = head_of()
            head.restore(path)
        rows = gt.RowOptimizer(head)
        generator = torch.Generator().manual_seed(step)
        features = torch.randn(BATCH, DIM, generator=generator)
        loss = head(features.to(device), torch.randint(CLASSES, (BATCH,), generator=generator))
        loss.backward()
        rows.step()
        losses.append(loss.item())
    return losses, head.weights()


def test_rows_on_a_device_train_and_are_restored_as_on_the_cpu(tmp_path: Path) -> None:
    losses, weights = trained("cuda", tmp_path)
    expected_losses, expected_weights = trained("cpu", tmp_path)
    assert losses == pytest.approx(expected_losses, rel=1e-4)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-3, atol=1e-4)
