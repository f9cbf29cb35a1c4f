"""Active rows of a rank in a step: as arrays of the host, or as tensors on a device without a host sync.

On a CPU the host's arrays are searched. On a device the row numbers stay on the device. If several ranks share the
active classes, the row numbers are padded to a fixed shape, and the host does not know how many are valid. Kernels skip
the padding. Plain tensor operations would compute it, so they cut it off first, which is a host sync. Micro-batches
with different classes in one update also cause one.

Legend: B samples of all ranks, L rows on this rank, A active ones of them, D width, N rows of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from geartrain.ams.programs.selection import ActiveClasses
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.specs import Ids
from geartrain.bridge.head.loss.batch import Batch, DeviceTargets, Targets
from geartrain.bridge.kernels.launch import is_capturing, runs_kernels
from geartrain.bridge.kernels.sample_terms import find_rows
from geartrain.bridge.placements.device_rows import RowIndex
from geartrain.bridge.rows.transfers import upload


@dataclass(frozen=True, eq=False)
class LocalPlaces:
    """Row numbers of the active classes on the device."""

    numbers_A: Tensor | None

    def chunk(self, start: int, stop: int) -> RowIndex:
        """Return the index of the rows at positions ``start`` … ``stop`` − 1."""
        return slice(start, stop) if self.numbers_A is None else self.numbers_A[start:stop]


@dataclass(frozen=True, eq=False)
class HostActive(ActiveClasses):
    """Active classes of this rank as arrays of the host: row numbers, or ids in a cluster."""

    @staticmethod
    def of(active: ActiveClasses, first: int, stop: int) -> HostActive:
        """Return the active ones of the classes ``first`` … ``stop`` − 1."""
        if active.sorted_ids is None:
            return HostActive(stop - first, None)
        low, high = np.searchsorted(active.sorted_ids, (first, stop))
        return HostActive(int(high - low), active.sorted_ids[low:high] - first)

    @property
    def has_all(self) -> bool:
        """Whether all rows are active."""
        return self.sorted_ids is None

    def positions(self, labels_B: Ids) -> Ids:
        """Return the position of each row number [B] among the active; −1 for other ranks' rows (numbers outside [0,
        L))."""
        if self.sorted_ids is None:
            return np.where((labels_B >= 0) & (labels_B < self.num), labels_B, -1)
        found = np.searchsorted(self.sorted_ids, labels_B)
        clipped = np.minimum(found, max(self.num - 1, 0))
        here = self.sorted_ids[clipped] == labels_B if self.num else np.zeros(len(labels_B), np.bool_)
        return np.where(here, clipped, -1)

    def targets(self, numbers_B: Ids | Tensor) -> Targets:
        """Return the position of each sample's label; labels of other ranks have numbers outside [0, L)."""
        assert not isinstance(numbers_B, Tensor), "labels on a device choose there"
        return Targets(self.positions(numbers_B))

    def offsets(self, numbers_B: Ids | Tensor, log2_weight: float | Tensor) -> Tensor:
        """Return offsets [A] float32: 0 for the rows of the labels, ``log2_weight`` for the others."""
        assert not isinstance(numbers_B, Tensor), "labels on a device choose there"
        positions = self.positions(numbers_B)
        offsets = np.full(self.num, log2_weight, np.float32)
        offsets[positions[positions >= 0]] = 0.0
        return torch.from_numpy(offsets)

    def union(self, other: LocalActive) -> HostActive:
        """Return the rows active in either set; this set, if it has all of them."""
        assert isinstance(other, HostActive), "those of one step are of one kind"
        if self.sorted_ids is None or other.sorted_ids is None:
            return self if self.sorted_ids is None else other
        if np.array_equal(self.sorted_ids, other.sorted_ids):
            return self
        numbers = np.union1d(self.sorted_ids, other.sorted_ids)
        return HostActive(len(numbers), numbers)

    def fills(self, union: LocalActive) -> bool:
        """Return whether this set is the whole of a union that contains it."""
        return self.num == union.num

    def holds(self, union: LocalActive, device: torch.device) -> Tensor:
        """Return a mask of a larger set's rows that are in this one, bool on the device."""
        assert isinstance(union, HostActive), "those of one step are of one kind"
        return upload(np.isin(union.ids, self.ids), device)

    def places(self, device: torch.device) -> LocalPlaces:
        """Return the rows' places, by chunk."""
        return LocalPlaces(None if self.sorted_ids is None else upload(self.sorted_ids, device))


@dataclass(frozen=True, eq=False)
class DeviceActive:
    """Active classes of this rank as tensors on the rows' device, otherwise as :class:`HostActive`."""

    num: int
    """Places (A), padding included."""
    numbers_A: Tensor | None
    """Row numbers, ascending; None: all rows. Those of padding are of any row, not below the others."""
    device: torch.device
    count: Tensor | None = None
    """Number of active rows, int64 (0-dim); the rest is padding; None: all."""

    def trimmed(self) -> DeviceActive:
        """Return this set without padding; waits for the device if there is any."""
        if self.count is None or self.numbers_A is None:
            return self
        num = int(self.count)
        return DeviceActive(num, self.numbers_A[:num], self.device)

    @property
    def has_all(self) -> bool:
        """Whether all rows are active."""
        return self.numbers_A is None

    def targets(self, numbers_B: Ids | Tensor) -> DeviceTargets:
        """Return targets as :class:`HostActive`; copies 8·B bytes to the device."""
        if self.numbers_A is None and not isinstance(numbers_B, Tensor):
            return DeviceTargets(upload(HostActive(self.num).positions(numbers_B), self.device))
        numbers = upload(numbers_B, self.device)
        if self.numbers_A is None:
            return DeviceTargets(torch.where((numbers >= 0) & (numbers < self.num), numbers, -1))
        if not self.num:
            return DeviceTargets(torch.full_like(numbers, -1))
        if runs_kernels(self.device):
            return DeviceTargets(find_rows(numbers, self.numbers_A, self.count))
        found_B = torch.searchsorted(self.numbers_A, numbers).clamp_(max=self.num - 1)
        is_other_B = self.numbers_A[found_B] != numbers
        if self.count is not None:
            is_other_B |= found_B >= self.count
        return DeviceTargets(found_B.masked_fill_(is_other_B, -1))

    def offsets(self, numbers_B: Ids | Tensor, log2_weight: float | Tensor) -> Tensor:
        offsets = torch.empty(self.num + 1, dtype=torch.float32, device=self.device)
        offsets = offsets.copy_(log2_weight) if isinstance(log2_weight, Tensor) else offsets.fill_(log2_weight)
        positions_B = self.targets(numbers_B).positions_B  # of other ranks' labels: the last, which is no row
        return offsets.index_put_((positions_B,), offsets.new_zeros(()))[:-1]

    def union(self, other: LocalActive) -> DeviceActive:
        """Return a union as :class:`HostActive`; waits for the device, which alone knows its size."""
        assert isinstance(other, DeviceActive), "those of one step are of one kind"
        if self.numbers_A is None or other.numbers_A is None or self.numbers_A is other.numbers_A:
            return self if self.numbers_A is None else other
        if is_capturing(self.device):
            raise InvalidArgument(
                "micro-batches of one step have different active classes, and the host must learn how many they are "
                "together, which a CUDA graph cannot capture; capture steps of one batch, or of FullSoftmax()"
            )
        parts = [active.trimmed().numbers_A for active in (self, other)]
        numbers = torch.unique(torch.cat([part for part in parts if part is not None]))
        return DeviceActive(len(numbers), numbers, self.device)

    def fills(self, union: LocalActive) -> bool:
        """Return the result of :class:`HostActive`; False for a padded set, whose size only the device knows, unless
        both share their row numbers."""
        assert isinstance(union, DeviceActive), "those of one step are of one kind"
        return self.num == union.num and (self.count is None or self.numbers_A is union.numbers_A)

    def holds(self, union: LocalActive, device: torch.device) -> Tensor:
        assert isinstance(union, DeviceActive) and self.numbers_A is not None, "a part of the union"
        numbers = torch.arange(union.num, device=device) if union.numbers_A is None else union.numbers_A
        if not self.num:
            return torch.zeros_like(numbers, dtype=torch.bool)
        found = torch.searchsorted(self.numbers_A, numbers).clamp_(max=self.num - 1)
        held = self.numbers_A[found] == numbers
        return held if self.count is None else held & (found < self.count)

    def places(self, device: torch.device) -> LocalPlaces:
        del device
        return LocalPlaces(self.numbers_A)


LocalActive = HostActive | DeviceActive
"""Active classes among the rows here, in ascending order."""


def add_log_q_correction(
    batch: Batch, active: LocalActive, labels_B: Ids | Tensor, log2_weight: float | Tensor | None
) -> None:
    """Apply the log-Q correction: add its offset to the logits of the sampled classes, not to those of the labels."""
    if isinstance(log2_weight, Tensor) or log2_weight:
        offsets_A = active.offsets(labels_B, log2_weight)
        batch.offsets_A = upload(offsets_A, batch.arithmetic.device).to(batch.arithmetic.compute)
