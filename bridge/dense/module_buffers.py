"""What a module has beside its trained parameters: buffers, which move by what the module changes in them, and
parameters that are not trained, which nothing moves.

Legend: B values, D width of a row, R = ceil(B / D) rows.
"""

from __future__ import annotations

from concurrent.futures import Future

import torch
from torch import Tensor

from geartrain.ams.client.writes import Write
from geartrain.ams.values.shard_messages import SyncGroup
from geartrain.bridge.dense.factory import Store
from geartrain.bridge.dense.tensors import ModuleTensors
from geartrain.bridge.rows.tables import as_numpy


class ModuleBuffers:
    """The table ``NAME.buffers`` and the module's own values. Its optimizer is SGD with lr 1, a push is of
    (what was pulled − what the module has): so the server moves by the difference, of ranks by its weighted mean."""

    def __init__(self, store: Store, tensors: ModuleTensors) -> None:
        self._store = store
        self._tensors = tensors
        self._base_RD = store.layout.empty()
        """What the module has of the server's values: they as they were last pulled, and what was pushed since."""
        self._sent: tuple[Tensor, Tensor] | None = None
        """Of the push under way: the base that it changes, and what that becomes."""
        store.layout.pack(self._now(), self._base_RD)

    def prepare(self, group: SyncGroup | None, sequence: int | None) -> Write | None:
        """Check and number the push of what changed; None if nothing did and no other rank counts on it."""
        self._sent = self._base_RD, self._packed()
        change_RD = as_numpy(self._base_RD - self._sent[1])
        if group is None and not change_RD.any():
            return None
        return self._store.table.prepare_push(self._store.ids, change_RD, group=group, sequence=sequence)

    def pushed(self) -> None:
        """What was prepared last is applied, or given up: it is not to be pushed again. Idempotent."""
        if self._sent is None:
            return
        (before_RD, after_RD), self._sent = self._sent, None
        if before_RD is self._base_RD:
            self._base_RD = after_RD
        else:  # values were pulled meanwhile
            self._base_RD = self._base_RD + (after_RD - before_RD)

    def drop_changes(self) -> None:
        """What the module changed since it was last pushed is pushed no more, and the next values replace it."""
        self._base_RD, self._sent = self._packed(), None

    def pull(self) -> tuple[Tensor, Future[None]]:
        """Begin to pull: rows [R, D] for :meth:`load` once the future is done."""
        rows_RD = self._store.layout.empty()
        return rows_RD, self._store.table.pull_into_async(self._store.ids, as_numpy(rows_RD))

    def load(self, rows_RD: Tensor) -> None:
        """Give the module the server's values; what it changed since its last push stays on top of them."""
        layout, now = self._store.layout, self._now()
        change_RD = self._packed() - self._base_RD
        held, base_RD = [torch.empty_like(item) for item in now], layout.empty()
        layout.unpack(rows_RD, held)
        layout.pack(held, base_RD)  # as the module's dtypes hold them
        layout.unpack(base_RD + change_RD, now)
        self._base_RD = base_RD  # a new one each time: a push under way tells by it whether values were pulled

    def _now(self) -> list[Tensor]:
        return list(self._tensors.others().values())

    def _packed(self) -> Tensor:
        """The module's values now, those of parameters as they were pulled."""
        rows_RD = self._store.layout.empty()
        self._store.layout.pack(self._now(), rows_RD)
        if num_frozen := self._tensors.num_frozen:
            stop = self._store.layout.parts[num_frozen - 1].stop
            rows_RD.view(-1)[:stop] = self._base_RD.view(-1)[:stop]
        return rows_RD
