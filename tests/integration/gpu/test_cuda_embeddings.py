"""Embeddings of rows on a CUDA device train as on the CPU. Skipped where there is none; ``make gpu-check`` runs it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import geartrain as gt

pytestmark = pytest.mark.cuda

IDS, SAMPLES, STEPS = 300, 64, 4
FIELDS: list[tuple[str, int, Any]] = [("a", 16, "sum"), ("b", 16, "mean"), ("c", 40, "sum")]


def trained(device: str, optimizer: Any, dtype: str) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, and the vectors of some bags after them."""
    table: dict[str, Any] = {"num_rows": IDS, "initializer": gt.Normal(std=0.1), "dtype": dtype}
    fields = [gt.Field(name, dim=dim, pooling=pooling, **table) for name, dim, pooling in FIELDS]
    group = gt.EmbeddingGroup(None, "t", fields, rows="ranks", optimizer=optimizer).to(device)
    rows, losses = gt.RowOptimizer(group), []
    for step in range(STEPS):
        random = torch.Generator().manual_seed(step)
        batch = {name: torch.randint(IDS, (SAMPLES, 3), generator=random).to(device) for name, *_ in FIELDS}
        loss = torch.stack([vectors.square().sum() for vectors in group(batch).values()]).sum()
        loss.backward()
        rows.step()
        rows.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        seen = group({name: torch.arange(IDS, device=device).unsqueeze(1) for name, *_ in FIELDS})
    return losses, {name: vectors.cpu() for name, vectors in seen.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", [gt.SGD(0.1), gt.Adagrad(0.05), gt.RowWiseAdagrad(0.05), gt.Adam(0.01)], ids=repr)
def test_embeddings_on_a_device_train_as_on_the_cpu(optimizer: Any, dtype: str) -> None:
    losses, vectors = trained("cuda", optimizer, dtype)
    expected_losses, expected = trained("cpu", optimizer, dtype)
    bound = 1e-4 if dtype == "float32" else 2e-2
    assert losses == pytest.approx(expected_losses, rel=bound)
    for name, found in vectors.items():
        torch.testing.assert_close(found, expected[name], rtol=bound, atol=bound)


@pytest.mark.parametrize("optimizer", [gt.Adagrad(0.05), gt.Adam(0.01)], ids=repr)
def test_embeddings_that_travel_by_nccl_to_the_rank_itself_are_the_same(
    optimizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that several ranks do, on one card."""
    expected_losses, expected = trained("cuda", optimizer, "float32")
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setenv("GEARTRAIN_COLLECTIVES_OF_ONE", "1")
        losses, vectors = trained("cuda", optimizer, "float32")
    finally:
        dist.destroy_process_group()
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    for name, found in vectors.items():
        torch.testing.assert_close(found, expected[name], rtol=1e-5, atol=1e-6)
