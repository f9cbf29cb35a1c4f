"""RowOptimizer trains whatever meets RowModule: here a table of vectors that no product code knows."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.table import Table
from geartrain.ams.values.errors import InvalidArgument
from geartrain.bridge.rows.gradient_carrier import squared_sum
from geartrain.bridge.rows.pending import RowModule
from geartrain.bridge.rows.ranks import SyncRanks
from geartrain.bridge.rows.row_update import RowUpdate
from geartrain.bridge.rows.tables import as_numpy

NUM, DIM = 40, 6


class VectorGradient:
    """Gradients [K, D] of distinct ids [K]."""

    def __init__(self, ids: np.ndarray, gradients_KD: Tensor) -> None:
        self.ids, self.gradients_KD = ids, gradients_KD

    def merge(self, other: VectorGradient) -> None:
        ids, places = np.unique(np.concatenate([self.ids, other.ids]), return_inverse=True)
        both = torch.cat([self.gradients_KD, other.gradients_KD])
        self.ids = ids
        self.gradients_KD = torch.zeros(len(ids), DIM).index_add_(0, torch.from_numpy(places), both)

    @property
    def squares(self) -> Tensor:
        return squared_sum(self.gradients_KD)

    def squared_norm(self) -> float:
        return float(self.squares)

    def joint_squared_norm(self, ranks: SyncRanks, weight: float) -> float:
        raise AssertionError(f"there are no other ranks: {ranks}, {weight}")

    is_one_push = False

    prepared = 0

    def push(self, update: RowUpdate) -> None:
        update.prepare_push(partial(update.table.prepare_push, self.ids, as_numpy(self.gradients_KD)))

    def discard(self) -> None:
        pass


class Vectors(nn.Module):
    """Rows of a table by id, pulled with a gradient."""

    def __init__(self, table: Table) -> None:
        super().__init__()
        self.table = table
        self.row_update = RowUpdate(table, ranks=None)

    def forward(self, ids: Tensor) -> Tensor:
        distinct, places = np.unique(ids.numpy(), return_inverse=True)
        pulled_KD = torch.from_numpy(self.table.pull(distinct))
        vectors_KD: Tensor = _Pulled.apply(self.row_update.carrier, pulled_KD, self.row_update, distinct)  # type: ignore[no-untyped-call]
        return vectors_KD[torch.from_numpy(places)]


class _Pulled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, carrier: Tensor, vectors_KD: Tensor, update: RowUpdate, ids: np.ndarray) -> Tensor:  # noqa: ARG004
        ctx.update, ctx.ids = update, ids
        return vectors_KD.view_as(vectors_KD)

    @staticmethod
    def backward(ctx: Any, gradients_KD: Tensor) -> Any:
        gradient = VectorGradient(ctx.ids, gradients_KD.clone())
        ctx.update.add(gradient, gradients_KD.sum(), len(ctx.ids))
        return None, None, None, None


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randint(NUM, (16,), generator=generator), torch.randn(16, generator=generator)) for _ in range(6)]


def test_a_module_of_ones_own_trains_as_parameters_would(cluster: Cluster) -> None:
    table = cluster.create_table("vectors", dim=DIM, optimizer=gt.SGD(lr=0.5), num_rows=NUM)
    vectors, plain = Vectors(table), nn.Embedding(NUM, DIM)
    plain.weight.data.copy_(torch.from_numpy(table.pull(np.arange(NUM))))
    twins = [nn.Linear(DIM, 1), nn.Linear(DIM, 1)]
    twins[1].load_state_dict(twins[0].state_dict())

    rows, row_sgd = gt.RowOptimizer(vectors), torch.optim.SGD(plain.parameters(), lr=0.5)
    dense, plain_dense = (torch.optim.SGD(twin.parameters(), lr=0.1) for twin in twins)
    scaler, plain_scaler = (torch.amp.GradScaler("cpu", init_scale=2.0**10) for _ in range(2))
    schedulers = [torch.optim.lr_scheduler.StepLR(item, step_size=2, gamma=0.5) for item in (rows, row_sgd)]

    def step(module: Any, twin: nn.Linear, pair: list[Any], scale: torch.amp.GradScaler, part: Any) -> None:
        for optimizer in pair:
            optimizer.zero_grad()
        for some in (slice(0, 8), slice(8, 16)):  # two micro-batches
            loss = (twin(module(part[0][some])).squeeze(1) - part[1][some]).square().mean() / 2
            scale.scale(loss).backward()
        for optimizer in pair:
            scale.unscale_(optimizer)

    for number, part in enumerate(batches()):
        step(vectors, twins[0], [rows, dense], scaler, part)
        step(plain, twins[1], [row_sgd, plain_dense], plain_scaler, part)
        norm = gt.clip_grad_norm_(twins[0].parameters(), rows, max_norm=0.5)
        expected = nn.utils.clip_grad_norm_([*twins[1].parameters(), *plain.parameters()], max_norm=0.5)
        torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
        for optimizer in (rows, dense):
            scaler.step(optimizer)
        for optimizer in (row_sgd, plain_dense):
            plain_scaler.step(optimizer)
        scaler.update()
        plain_scaler.update()
        for scheduler in schedulers:
            scheduler.step()
        assert vectors.row_update.step == number + 1
    assert rows.param_groups[0]["lr"] == row_sgd.param_groups[0]["lr"] == 0.0625
    assert rows.param_groups[0]["table"] == "vectors"
    trained = torch.from_numpy(table.pull(np.arange(NUM)))
    torch.testing.assert_close(trained, plain.weight.data, rtol=1e-5, atol=1e-6)


def test_it_trains_beside_a_head() -> None:
    with gt.local() as cluster:
        vectors = Vectors(cluster.create_table("vectors", dim=DIM, optimizer=gt.SGD(lr=0.5), num_rows=NUM))
        head = gt.ClassHead(cluster, "classes", num_classes=50, dim=DIM)
        assert isinstance(vectors, RowModule) and isinstance(head, RowModule)
        rows = gt.RowOptimizer(nn.ModuleList([vectors, head]))
        head(vectors(torch.arange(5)), torch.arange(5)).backward()
        rows.step()
        assert [group["table"] for group in rows.param_groups] == ["vectors", "classes"]
        assert (vectors.row_update.step, head.step) == (1, 1)


def test_what_a_module_lacks_is_named() -> None:
    with pytest.raises(InvalidArgument, match=r"Linear.* has no row_update"):
        gt.RowOptimizer(nn.Linear(2, 2))  # type: ignore[arg-type]
    wrong = nn.Linear(2, 2)
    wrong.row_update = 3  # type: ignore[assignment]
    with pytest.raises(InvalidArgument, match="a row_update that is no PendingUpdate but 3"):
        gt.RowOptimizer(wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="no module"):
        gt.RowOptimizer()
