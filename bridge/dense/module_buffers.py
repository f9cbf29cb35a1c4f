"""A module's tensors beside its trained parameters: buffers, which the module changes, and frozen parameters.

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
    """Sync of the table ``NAME.buffers`` and the module's own values.

    Its optimizer is SGD with lr 1, and a push is (pulled value − module's value): so the server moves by the
    difference; with ranks by its weighted mean.
    """

    def __init__(self, store: Store, tensors: ModuleTensors) -> None:
        self._store = store
        self._tensors = tensors
        self._base_RD = store.layout.empty()
        """Server's values as the module has them: as last pulled, plus what was pushed since."""
        self._sent: tuple[Tensor, Tensor] | None = None
        """Base that the push in progress changes, and what it becomes; None: no push."""
        store.layout.pack(self._now(), self._base_RD)

    def prepare(self, group: SyncGroup | None, sequence: int | None) -> Write | None:
        """Check and number the push of changes; None if there are none and no other rank counts on this one."""
        self._sent = self._base_RD, self._packed()
        change_RD = as_numpy(self._base_RD - self._sent[1])
        if group is None and not change_RD.any():
            return None
        return self._store.table.prepare_push(self._store.ids, change_RD, group=group, sequence=sequence)

    def pushed(self) -> None:
        """Record that the prepared push was applied, or given up: it must not be pushed again. Idempotent."""
        if self._sent is None:
            return
        (before_RD, after_RD), self._sent = self._sent, None
        if before_RD is self._base_RD:
            self._base_RD = after_RD
        else:  # values were pulled in between
            self._base_RD = self._base_RD + (after_RD - before_RD)

    def drop_changes(self) -> None:
        """Drop the module's changes since the last push; the next pulled values replace them."""
        self._base_RD, self._sent = self._packed(), None

    def pull(self) -> tuple[Tensor, Future[None]]:
        """Start to pull; return rows [R, D] for :meth:`load` once the future is done."""
        rows_RD = self._store.layout.empty()
        return rows_RD, self._store.table.pull_into_async(self._store.ids, as_numpy(rows_RD))

    def load(self, rows_RD: Tensor) -> None:
        """Set the module's values from the server's; changes since its last push stay on top of them."""
        layout, now = self._store.layout, self._now()
        change_RD = self._packed() - self._base_RD
        held, base_RD = [torch.empty_like(item) for item in now], layout.empty()
        layout.unpack(rows_RD, held)
        layout.pack(held, base_RD)  # rounded to the module's dtypes
        layout.unpack(base_RD + change_RD, now)
        self._base_RD = base_RD  # a new tensor: a push in progress sees by it that values were pulled

    def _now(self) -> list[Tensor]:
        return list(self._tensors.others().values())

    def _packed(self) -> Tensor:
        """Return the module's current values; of frozen parameters those that were pulled."""
        rows_RD = self._store.layout.empty()
        self._store.layout.pack(self._now(), rows_RD)
        if num_frozen := self._tensors.num_frozen:
            stop = self._store.layout.parts[num_frozen - 1].stop
            rows_RD.view(-1)[:stop] = self._base_RD.view(-1)[:stop]
        return rows_RD
