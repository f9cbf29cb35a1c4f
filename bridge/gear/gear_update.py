"""Gradients of dense features that a fast gear collects between two steps, and delivers in the optimizer's step.

Legend: D width of a dense feature, K distinct ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from geartrain.ams.kernels import ops
from geartrain.ams.values.errors import InvalidArgument, NonFinite, TableNotFound
from geartrain.ams.values.gear_messages import Delivery, GearPort
from geartrain.ams.values.optimizers.registry import RowOptimizerSpec
from geartrain.ams.values.specs import Ids
from geartrain.bridge.rows.gradient_carrier import squared_sum
from geartrain.bridge.rows.pending import PendingUpdate
from geartrain.bridge.rows.tables import ReadableTable


@dataclass
class GearGradient:
    """Gradients [K, D] float32 of the features of ids [K], of one or several micro-batches."""

    ids: Ids
    gradients_KD: Tensor
    versions: npt.NDArray[np.int64]

    def merge(self, other: GearGradient) -> None:
        """Add another micro-batch's gradients; an id in both gets the sum, and the older of its feature versions."""
        ids, places, _ = ops.merge_duplicates(np.concatenate([self.ids, other.ids]))
        gradients_KD = torch.zeros(len(ids), self.gradients_KD.shape[1], dtype=torch.float32, device="cpu")
        gradients_KD.index_add_(0, torch.from_numpy(places), torch.cat([self.gradients_KD, other.gradients_KD]))
        versions = np.full(len(ids), np.iinfo(np.int64).max)
        np.minimum.at(versions, places, np.concatenate([self.versions, other.versions]))
        self.ids, self.gradients_KD, self.versions = ids, gradients_KD, versions

    @property
    def squares(self) -> Tensor:
        """Σ g² of all gradients (0-dim, float64)."""
        return squared_sum(self.gradients_KD)

    def squared_norm(self) -> float:
        """Return Σ g² in float64."""
        return float(self.squares)

    def discard(self) -> None:
        """Do nothing: there is no memory to release."""


class GearUpdate(PendingUpdate[GearGradient]):
    """Gradients of dense features, delivered to their slow gears by :class:`geartrain.RowOptimizer`'s step.

    Each delivery has the number ``step + 1``: a job that is resumed from a saved step, with the same stream name,
    repeats the numbers of the steps that it repeats, and they are not counted twice.
    """

    def __init__(
        self, table: ReadableTable, port: GearPort, source: str, incarnation: int, *, trains_here: bool
    ) -> None:
        super().__init__()
        self.table = table
        self._port = port
        self._source = source
        self._incarnation = incarnation
        self._delivery: Delivery | None = None
        self._trained_here = table.incarnation if trains_here else None

    def switch_table(self, table: ReadableTable, port: GearPort) -> None:
        """Use another table, of a new slow gear in this process; pending gradients are dropped."""
        self.discard()
        self.table, self._port, self._trained_here = table, port, table.incarnation

    def require_present(self) -> None:
        """Raise TableNotFound if the dense table was restored since its features were computed.

        For a slow gear of this process, whose features, counts and gradients are older, that is since it was made;
        otherwise since the pending gradients were collected.
        """
        if self._trained_here is None:
            super().require_present()
        elif self.table.incarnation != self._trained_here:
            raise TableNotFound(
                f"dense table {self.table.spec.name!r} was restored, and this slow gear is of the one before it; "
                "close() it, and make another SlowGear with reuse=True"
            )

    def check_finite(self) -> None:
        """Raise NonFinite, naming an id, if the pending gradients or their scale are not finite."""
        try:
            super().check_finite()
        except NonFinite as exc:
            assert self._pending is not None
            bad = ~torch.isfinite(self._pending.gradients_KD).all(dim=1).numpy()
            if not bad.any():
                raise
            ids = self._pending.ids[bad]
            raise NonFinite(
                f"the feature gradients of {len(ids)} of {len(bad)} ids of {self.table.spec.name!r} hold NaN or "
                f"infinity, first that of id {ids[0]}; nothing was delivered. Call zero_grad() to skip this step, "
                "drop_non_finite() to go on without these ids, or lower the learning rate"
            ) from exc

    def drop_non_finite(self) -> Ids:
        """Drop ids with a gradient that is not finite, before any unscaling; return them [n]."""
        if self._pending is None or self.carrier.grad is None:
            return np.empty(0, np.int64)
        good = torch.isfinite(self._pending.gradients_KD).all(dim=1)
        dropped: Ids = self._pending.ids[~good.numpy()]
        if len(dropped):
            self._pending.ids = self._pending.ids[good.numpy()]
            self._pending.gradients_KD = self._pending.gradients_KD[good]
            self._pending.versions = self._pending.versions[good.numpy()]
            self._set_norm(torch.ones_like(self.carrier))
        return dropped

    def param_group(self) -> dict[str, Any]:
        """Return the parameter group; deliveries carry only its learning rate."""
        return {"params": [self.carrier], "lr": self.first_optimizer.lr, "table": self.name}

    def optimizer_of(self, group: Mapping[str, Any]) -> RowOptimizerSpec:
        optimizer = super().optimizer_of(group)
        if changed := self.table.spec.optimizer.scalars_of_push(optimizer):
            raise InvalidArgument(
                f"{', '.join(changed)} of dense table {self.table.spec.name!r} cannot change: deliveries to slow gears "
                "carry the learning rate alone"
            )
        return optimizer

    def apply(self, optimizer: RowOptimizerSpec) -> None:
        """Deliver the pending gradients with the learning rate of ``optimizer``, then drop them.

        After an error a second call delivers the same again, under the same number: a slow gear counts it once.
        """
        if self._pending is None or self.carrier.grad is None:
            return
        if self._delivery is None:
            gradients_KD = self._pending.gradients_KD * self.factor()
            self._delivery = Delivery(
                source=self._source,
                incarnation=self._incarnation,
                sequence=self.step + 1,
                ids=self._pending.ids,
                gradients_KD=gradients_KD.numpy(),
                versions=self._pending.versions,
                lr=optimizer.lr,
                table_incarnation=self.table.incarnation,
            )
        self._port.deliver(self._delivery)
        self._delivery = None
        self.step += 1
        self.discard()

    def add(self, gradient: GearGradient, checksum: Tensor, samples: int) -> None:
        if self._delivery is not None:
            raise InvalidArgument(
                f"the last delivery to {self.table.spec.name!r} stopped with an error; call step() again, or "
                "zero_grad() to give it up, before the next backward()"
            )
        super().add(gradient, checksum, samples)

    def discard(self) -> None:
        """Drop pending gradients. The number of a failed delivery is not used again: some slow gear may have it."""
        if self._delivery is not None:
            self._delivery = None
            self.step += 1
        super().discard()
