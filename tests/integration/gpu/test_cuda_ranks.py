"""Class rows on a CUDA device, and graphs by its products. Skipped where there is none; ``make gpu-check`` runs it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import geartrain as gt
from geartrain.ams.graph.building.builder import build_neighbours
from geartrain.ams.graph.building.neighbours import NeighbourTable
from geartrain.ams.graph.building.rows import ArrayRows
from geartrain.bridge.head.selection.graph_products import TorchProducts
from geartrain.bridge.head.selection.torch_selection import TorchGraph, near_on
from geartrain.bridge.kernels.sampling import filled_by_sample
from geartrain.bridge.rows.transfers import upload

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
    found_scores = engine.scores(block.rows_ND, block.rows_ND).cpu().numpy() / engine.unit
    assert np.abs(found_scores - true).max() <= engine.error_bound(DIM)
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
            optimizer=gt.SparseMomentum(lr=0.1),
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


@pytest.mark.parametrize("with_graph", [True, False])
def test_a_device_chooses_the_classes_that_the_host_chooses(with_graph: bool) -> None:
    random = np.random.default_rng(2)
    k = 7 if with_graph else 0
    lists = random.integers(0, CLASSES, CLASSES * k, dtype=np.int32)
    table = NeighbourTable(np.arange(CLASSES + 1, dtype=np.int64) * k, lists, 7)
    device = torch.device("cuda")
    graph = TorchGraph.of(table, device)
    for step, budget in enumerate([BATCH, 200, 2_999]):
        labels = random.integers(0, CLASSES, BATCH)
        near = near_on(upload(labels, device), graph, 1.0, budget)
        found = filled_by_sample(near, CLASSES, budget, 5, step, start=0, stop=CLASSES, room=budget)
        assert int(found.num) == budget
        np.testing.assert_array_equal(found.ids_A.cpu().numpy(), table.select(labels, budget, seed=5, step=step))


@pytest.mark.parametrize(
    "select", [gt.KNNSoftmax(0.2, k=8, rebuild="epoch"), gt.PartialFC(0.2), gt.FullSoftmax()], ids=repr
)
def test_no_host_waits_in_a_step(select: gt.KNNSoftmax | gt.PartialFC | gt.FullSoftmax) -> None:
    head = gt.ClassHead(
        None, "t", num_classes=CLASSES, dim=DIM, select=select, margin=gt.ArcFace(scale=64), rows="ranks"
    )
    head.to("cuda")
    rows = gt.RowOptimizer(head)
    features = torch.randn(BATCH, DIM, device="cuda", requires_grad=True)
    try:
        for step in range(5):
            torch.cuda.set_sync_debug_mode("error" if step >= 2 else "default")  # the first ones build and reserve
            head(features, torch.randint(CLASSES, (BATCH,))).backward()
            rows.step()
            rows.zero_grad()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert features.grad is not None and bool(features.grad.isfinite().all())


@pytest.mark.parametrize("optimizer", [gt.SparseMomentum(lr=0.1), gt.AdamW(lr=0.01)], ids=["momentum", "AdamW"])
def test_a_captured_step_makes_the_rows_of_launched_ones(optimizer: gt.SparseMomentum | gt.AdamW) -> None:
    features, labels = torch.empty(BATCH, DIM, device="cuda"), torch.empty(BATCH, dtype=torch.int64, device="cuda")

    def trained(graph_from: int) -> tuple[int, torch.Tensor]:
        head = gt.ClassHead(
            None,
            "t",
            num_classes=CLASSES,
            dim=DIM,
            select=gt.PartialFC(0.2),
            margin=gt.ArcFace(scale=16),
            optimizer=optimizer,
            rows="ranks",
            config=gt.HeadConfig(dtype="bfloat16"),
        ).to("cuda")
        rows = gt.RowOptimizer(head)
        schedule = torch.optim.lr_scheduler.ExponentialLR(rows, 0.9)
        graph = torch.cuda.CUDAGraph()

        def step() -> None:
            head(features, labels).backward()
            rows.step()
            rows.zero_grad()

        for number in range(8):
            generator = torch.Generator().manual_seed(number)
            features.copy_(torch.randn(BATCH, DIM, generator=generator))
            labels.copy_(torch.randint(CLASSES, (BATCH,), generator=generator))
            if number == graph_from:
                with torch.cuda.graph(graph):
                    step()
            if number >= graph_from:
                rows.replay(graph)
            else:
                step()
            schedule.step()
        return head.step, head.weights()

    (steps, found), (_, expected) = trained(3), trained(8)
    assert steps == 8 and torch.equal(found, expected)
