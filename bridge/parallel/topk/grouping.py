"""Top-k selection in many tensors at once: tensors of similar size in one matrix, divided into chunks.

Tensors of similar size are the rows of a matrix, padded with zeros, so that each operation serves all of them. A row is
divided into chunks of C elements. The k chunks with the largest maxima contain the k largest elements of a row: if an
element is in another chunk, the maxima of those k are k elements before it. So one pass over all elements gives the
maxima, and exact selections follow among n / C maxima and k · C survivors, C about √(n / k).

After the 100-million-class paper, section 3.3.2, Fig. 5. There the k largest of every chunk survive, which are more.

Shapes: T tensors of a group, M chunks of each, C elements of a chunk, K selected elements of all tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SIMILAR = 0.75
"""Size, as a share of a group's largest tensor, from which another tensor joins the group."""
SMALL = 4096
"""Size up to which all tensors form one group: padding costs less than another group's operations."""
_LAST_PLACE = 2**32 - 1


@dataclass(frozen=True, eq=False)
class Group:
    """Tensors in one matrix [T, M · C]."""

    tensors: list[int]
    """[T] numbers of the tensors."""
    ks: list[int]
    """[T] number selected of each."""
    start: int
    """Start of the matrix in the buffer."""
    chunks: int
    """M, chunks of a row."""
    chunk: int
    """C, elements of a chunk."""

    @property
    def row(self) -> int:
        """Elements from one tensor to the next."""
        return self.chunks * self.chunk


def grouped(numels: Sequence[int], ks: Sequence[int]) -> list[Group]:
    """Group tensors with 0 < k by similar size, largest first."""
    order = sorted((number for number, k in enumerate(ks) if k), key=lambda number: (-numels[number], number))
    members: list[list[int]] = []
    for number in order:
        largest = numels[members[-1][0]] if members else 0
        if members and (numels[number] >= SIMILAR * largest or largest <= SMALL):
            members[-1].append(number)
        else:
            members.append([number])
    groups: list[Group] = []
    start = 0
    for tensors in members:
        largest, most = numels[tensors[0]], max(ks[number] for number in tensors)
        chunk = 2 ** round(math.log2(largest / most) / 2)
        group = Group(tensors, [ks[number] for number in tensors], start, -(-largest // chunk), chunk)
        start += len(tensors) * group.row
        groups.append(group)
    return groups


def ranked(magnitudes: Tensor, places: Tensor) -> Tensor:
    """Return keys ordered by magnitude, and for equal magnitudes by place from last to first.

    Args:
        magnitudes: float32 [...], none below 0.
        places: int64, below 2**32, of a shape that broadcasts to that of ``magnitudes``.

    Returns:
        int64 [...]; no two of a row are equal if no two places are.
    """
    bits = magnitudes.contiguous().view(torch.int32).to(torch.int64)
    return (bits << 32) | (_LAST_PLACE - places)


def places_of(keys: Tensor) -> Tensor:
    """Return the places that :func:`ranked` put into keys."""
    return _LAST_PLACE - (keys & _LAST_PLACE)


class GroupedTopK:
    """Selects in tensors that follow each other, group by group, in one buffer. Index tensors are made once.

    About 20 operations for each group, whatever the number of tensors in it; no host sync.
    """

    def __init__(self, numels: Sequence[int], ks: Sequence[int], device: torch.device) -> None:
        """Prepare for tensors of ``numels`` elements, selecting ``ks`` of each: 0 <= ks[i] <= numels[i] < 2**31."""
        self.device = device
        self._groups = grouped(numels, ks)
        self._numels = [numel if k else 0 for numel, k in zip(numels, ks, strict=True)]
        self._starts = [0] * len(numels)
        self._taken: list[Tensor] = []
        for group in self._groups:
            most = max(group.ks)
            for row, number in enumerate(group.tensors):
                self._starts[number] = group.start + row * group.row
            taken = [torch.arange(k) + row * most for row, k in enumerate(group.ks)]
            self._taken.append(torch.cat(taken).to(device))
        self._starts_on_device = torch.tensor(self._starts, dtype=torch.int64, device=device)
        owners = [number for group in self._groups for number in group.tensors]
        counts = [k for group in self._groups for k in group.ks]
        self._owners = torch.tensor(owners, dtype=torch.int64).repeat_interleave(torch.tensor(counts)).to(device)
        self.buffer_numel = sum(len(group.tensors) * group.row for group in self._groups)
        """Elements of the buffer, padding included."""

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Return each tensor's part [numel] of the buffer; [0] for one of which nothing is selected."""
        return [buffer[start : start + numel] for start, numel in zip(self._starts, self._numels, strict=True)]

    def select(self, buffer: Tensor) -> tuple[Tensor, Tensor]:
        """Select the largest magnitudes of each tensor; of equal ones those of lower index.

        Args:
            buffer: float32 [buffer_numel], zeros between the tensors. NaN counts as larger than infinity.

        Returns:
            Indices int64 [K] within each tensor, one tensor after the other, ascending in each; and their places in the
            buffer, int64 [K].
        """
        if not self._groups:
            return self._owners, self._owners
        found = torch.cat([self._in_group(number, buffer) for number in range(len(self._groups))])
        keys = ((self._owners << 32) | found).sort().values
        indices = keys & _LAST_PLACE
        return indices, self._starts_on_device[keys >> 32] + indices

    def _in_group(self, number: int, buffer: Tensor) -> Tensor:
        """Return the indices of a group's selected elements, one tensor after the other."""
        group = self._groups[number]
        matrix = buffer[group.start : group.start + len(group.tensors) * group.row].view(-1, group.chunks, group.chunk)
        most = max(group.ks)
        largest = torch.maximum(matrix.amax(2), matrix.amin(2).neg_()).abs_()  # without a copy of the matrix
        maxima = ranked(largest, torch.arange(group.chunks, device=buffer.device))
        chosen = places_of(maxima.topk(min(most, group.chunks), sorted=False).values)
        rows = torch.arange(len(group.tensors), device=buffer.device)[:, None]
        places = chosen[:, :, None] * group.chunk + torch.arange(group.chunk, device=buffer.device)
        survivors = ranked(matrix[rows, chosen].abs(), places).flatten(1)
        return places_of(survivors.topk(most).values.flatten()[self._taken[number]])
