"""The class head in the plainest PyTorch, and a table in the plainest numpy: what the tests compare with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from geartrain.ams.programs.selection import PartialFC
from geartrain.ams.values.errors import NonFinite
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.optimizers.spec import NO_SCALARS
from geartrain.ams.values.shard_messages import Done, SyncGroup
from geartrain.ams.values.specs import Ids, TableSpec
from geartrain.bridge.head.loss.margins.angular import COS_LIMIT, CombinedMargin, psi


def sampled_weights(select: object, margin: object, active: Ids, labels: Tensor, num_classes: int) -> Tensor | None:
    """How many classes each active one [A] stands for, where ``select`` corrects its sampling."""
    if not isinstance(select, PartialFC) or not (margin is None if select.corrected is None else select.corrected):
        return None
    is_label = torch.from_numpy(np.isin(active, labels.numpy()))
    num_labels = int(is_label.sum())
    if num_labels == len(active):
        return None
    return torch.where(is_label, 1.0, (num_classes - num_labels) / (len(active) - num_labels)).double()


def plain_loss(
    features: Tensor, rows: Tensor, targets: Tensor, margin: CombinedMargin | None, weights: Tensor | None = None
) -> Tensor:
    """Mean softmax loss by the formula of the papers, with autograd, every logit written out."""
    return F.cross_entropy(plain_logits(features, rows, targets, margin, weights), targets)


def plain_logits(
    features: Tensor, rows: Tensor, targets: Tensor, margin: CombinedMargin | None, weights: Tensor | None = None
) -> Tensor:
    """Logits [B, A]; ``weights`` [A] multiply the exponentials."""
    more = 0.0 if weights is None else weights.log()
    if margin is None:
        return features @ rows.t() + more
    cos = F.normalize(features) @ F.normalize(rows).t()
    target = cos.gather(1, targets[:, None])
    if margin.m1 != 1 or margin.m2 != 0:
        angle = torch.acos(target.clamp(-COS_LIMIT, COS_LIMIT))
        target = psi(margin.m1 * angle + margin.m2)[0]
    return margin.scale * cos.scatter(1, targets[:, None], target - margin.m3) + more


def plain_gradients(
    features: Tensor, rows: Tensor, targets: Tensor, margin: CombinedMargin | None, weights: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, feature gradient [B, D] and row gradient [A, D] in float64."""
    x = features.detach().double().requires_grad_()
    w = rows.detach().double().requires_grad_()
    loss = plain_loss(x, w, targets, margin, weights)
    loss.backward()
    assert x.grad is not None
    assert w.grad is not None
    return loss.detach(), x.grad, w.grad


@dataclass
class FakeWrite:
    """A push that is applied when it is sent, and can be made to fail first."""

    table: FakeTable
    ids: Ids
    gradients: npt.NDArray[Any]
    lr: float
    scale: float
    group: SyncGroup | None
    abandoned: bool = False
    is_sent: bool = False

    def send(self) -> Done:
        if self.table.failures:
            raise self.table.failures.pop(0)
        self.table.apply(self)
        self.is_sent = True
        return Done()

    def send_with(self, others: Sequence[FakeWrite]) -> None:
        for write in (self, *others):
            write.send()

    def abandon(self) -> None:
        self.abandoned = True


@dataclass
class FakeTable:
    """Rows in one numpy array; pushes are recorded and applied as SGD."""

    spec: TableSpec
    rows: npt.NDArray[Any]
    pushes: list[FakeWrite] = field(default_factory=list)
    failures: list[Exception] = field(default_factory=list)
    largest_pull: int = 0
    pulled_rows: int = 0
    incarnation: int = 0

    def pull_into(self, ids: Ids, out: npt.NDArray[Any], *, required_sync: SyncGroup | None = None) -> None:
        del required_sync
        assert out.flags.c_contiguous
        assert len(np.unique(ids)) == len(ids)
        self.largest_pull = max(self.largest_pull, len(ids))
        self.pulled_rows += len(ids)
        out[:] = self.rows[ids]

    def pull_into_async(
        self, ids: Ids, out: npt.NDArray[Any], *, required_sync: SyncGroup | None = None
    ) -> Future[None]:
        future: Future[None] = Future()
        self.pull_into(ids, out, required_sync=required_sync)
        future.set_result(None)
        return future

    def prepare_push(
        self,
        ids: Ids,
        gradients: npt.NDArray[Any],
        *,
        lr: float | None = None,
        scale: float = 1.0,
        optimizer_scalars: Mapping[str, float] = NO_SCALARS,
        group: SyncGroup | None = None,
        step_goes_on: bool = False,
        known_finite: bool = False,
    ) -> FakeWrite:
        assert not optimizer_scalars  # SGD without weight decay
        del step_goes_on  # its rows stay where nobody pushes them
        del known_finite  # it looks all the same
        assert len(np.unique(ids)) == len(ids)
        if not np.isfinite(gradients.astype(np.float32)).all():
            raise NonFinite("a pushed gradient is not finite")
        return FakeWrite(self, ids, gradients, self.spec.optimizer.lr if lr is None else lr, scale, group)

    def apply(self, write: FakeWrite) -> None:
        kept = FakeWrite(self, write.ids.copy(), write.gradients.copy(), write.lr, write.scale, write.group)
        self.pushes.append(kept)
        change = write.lr * write.scale * write.gradients.astype(np.float64)
        self.rows[write.ids] = (self.rows[write.ids].astype(np.float64) - change).astype(self.rows.dtype)

    def assign(self, ids: Ids, rows: npt.NDArray[Any]) -> Done:
        self.rows[ids] = rows
        return Done()


class FakeCluster:
    """Makes fake tables with random rows of about unit length."""

    def __init__(self, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)
        self.tables: dict[str, FakeTable] = {}

    def create_table(self, name: str, *, reuse: bool = False, **fields: Any) -> FakeTable:
        if reuse and name in self.tables:
            return self.tables[name]
        spec = TableSpec(name=name, **fields)
        rows = self._random.normal(size=(spec.num_rows or 0, spec.dim)).astype(spec.numpy_dtype)
        self.tables[name] = FakeTable(spec, rows)
        return self.tables[name]


def merged_gradient(table: FakeTable) -> npt.NDArray[np.float64]:
    """The sum of all pushes as a dense array, scale included."""
    total = np.zeros(table.rows.shape)
    for push in table.pushes:
        total[push.ids] += push.scale * push.gradients.astype(np.float64)
    return total


UNIT_SGD = SGD(lr=1.0)
"""Makes the change of the rows equal to the gradient."""
