"""Gather and sum of rows over all ranks part by part, overlapped with computation: a batch as micro-batches.

The result is the same as that of one gather: in rank order, the parts of a rank one after the other. At most two
gathers, or two sums, are under way at a time.

Legend: R ranks, P parts, B rows of all ranks and parts, S of one part of this rank, D width.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from geartrain.ams.values.errors import SyncError
from geartrain.bridge.collectives.communicator import Communicator, Pending

MAX_ON_THEIR_WAY = 2


class PartSizes:
    """Number of rows of each part on each rank, and their places among all rows."""

    def __init__(self, sizes_RP: Sequence[Sequence[int]], rank: int) -> None:
        self.sizes_RP = [list(sizes) for sizes in sizes_RP]
        self.rank = rank
        self._places: list[list[slice]] = [[] for _ in range(self.num_parts)]
        first = 0
        for sizes in self.sizes_RP:
            for part, size in enumerate(sizes):
                self._places[part].append(slice(first, first + size))
                first += size
        self.total = first

    @property
    def num_parts(self) -> int:
        """Number P of parts."""
        return len(self.sizes_RP[0])

    def of(self, part: int) -> list[int]:
        """Return the number of rows of each rank in one part."""
        return [sizes[part] for sizes in self.sizes_RP]

    def places(self, part: int) -> list[slice]:
        """Return where each rank's rows of a part are among all rows."""
        return self._places[part]

    def own(self, part: int) -> slice:
        """Return where this rank's rows of a part are among all rows."""
        return self._places[part][self.rank]


class GatheredParts:
    """Rows of all ranks, gathered part by part: one all-gather each, and one copy of its result."""

    def __init__(self, link: Communicator, sizes: PartSizes, *, overlap: bool = True) -> None:
        """Without ``overlap``, :meth:`start` waits for its part."""
        self._link, self._sizes = link, sizes
        self._most = MAX_ON_THEIR_WAY if overlap else 0
        self._on_their_way: deque[tuple[int, Pending[Tensor]]] = deque()
        self._whole: Tensor | None = None
        self._pending_failures: tuple[int, Pending[list[list[int]]]] | None = None
        """Last part of :meth:`start_or_fail`, and its exchange of failures."""

    def start(self, part: int, rows_SD: Tensor) -> None:
        """Start to gather this rank's rows of a part, once at most one other is under way. Raises RankLost."""
        if self._whole is None:
            self._whole = rows_SD.new_empty(self._sizes.total, *rows_SD.shape[1:])
        while len(self._on_their_way) >= max(1, self._most):
            self._collect()
        self._on_their_way.append((part, self._link.start_gather(rows_SD, self._sizes.of(part))))
        if not self._most:
            self._collect()

    def start_or_fail(self, part: int, rows_SD: Tensor, failure: Exception | None) -> None:
        """Do :meth:`start`, and exchange whether this rank has a ``failure``; such a rank gives rows, too.

        The next part, or :meth:`whole`, checks the answers. If a rank failed, all raise: that rank its failure, the
        others SyncError.
        """
        exchange = self._link.start_exchange([failure is None])
        self._raise_if_failed(failure, exchange)
        self._pending_failures = part, exchange
        self.start(part, rows_SD)

    def whole(self, failure: Exception | None = None) -> Tensor:
        """Return all rows [B, D], once every part was started. Raises RankLost, and as :meth:`start_or_fail`."""
        self._collect_all()
        self._raise_if_failed(failure, None)
        assert self._whole is not None
        return self._whole

    def _raise_if_failed(self, failure: Exception | None, last: Pending[list[list[int]]] | None) -> None:
        """Raise if a rank failed in the part before, after waiting for all collectives and the ``last`` exchange."""
        if self._pending_failures is None:
            return
        part, exchange = self._pending_failures
        is_well = [well for (well,) in exchange.result()]
        if 0 not in is_well:
            return
        if last is not None:
            last.result()
        self._collect_all()
        raise failure or SyncError(f"rank {is_well.index(0)} failed in micro-batch {part}; its error tells why")

    def _collect_all(self) -> None:
        while self._on_their_way:
            self._collect()

    def _collect(self) -> None:
        part, pending = self._on_their_way.popleft()
        assert self._whole is not None
        arrived = torch.split(pending.result(), self._sizes.of(part))
        for place, rows in zip(self._sizes.places(part), arrived, strict=True):
            self._whole[place] = rows


class SummedParts:
    """Sums of ``whole_BD`` over the ranks, of which each rank gets its own rows: one reduce-scatter a part.

    Every rank starts the parts in the same ``order``, and should collect them in it: while one is used, the next two
    are under way. ``whole_BD`` must not be written before the last one is started.
    """

    def __init__(
        self, link: Communicator, sizes: PartSizes, whole_BD: Tensor, order: Iterable[int], *, overlap: bool = True
    ) -> None:
        """Start the first two; without ``overlap``, run all one by one. Raises RankLost."""
        self._link, self._sizes, self._whole_BD = link, sizes, whole_BD
        self._waiting = deque(order)
        self._begun: dict[int, Pending[Tensor]] = {}
        while self._waiting and (not overlap or len(self._begun) < MAX_ON_THEIR_WAY):
            pending = self._start_next()
            if not overlap:
                pending.result()

    def collect(self, part: int) -> Tensor:
        """Return the sum of this rank's rows of a part [S, D], once. Raises RankLost."""
        while part not in self._begun:
            self._start_next()
        own_SD = self._begun.pop(part).result()
        if self._waiting and len(self._begun) < MAX_ON_THEIR_WAY:
            self._start_next()
        return own_SD

    def _start_next(self) -> Pending[Tensor]:
        part = self._waiting.popleft()
        rows = torch.cat([self._whole_BD[place] for place in self._sizes.places(part)])
        self._begun[part] = pending = self._link.start_sum_to_owners(rows, self._sizes.of(part))
        if not self._waiting:
            self._whole_BD = rows[:0]  # to release its memory
        return pending


class _Travelled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_SD: Tensor, take: Callable[[], Tensor]) -> Tensor:
        ctx.take, ctx.dtype = take, rows_SD.dtype
        return rows_SD.view_as(rows_SD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, nothing: Tensor) -> tuple[Tensor, None]:
        del nothing
        return ctx.take().to(ctx.dtype), None


def with_travelled_gradient(rows_SD: Tensor, take: Callable[[], Tensor]) -> Tensor:
    """Return the rows; their gradient is that received from other ranks, ``take()``, not the upstream one."""
    travelled: Tensor = _Travelled.apply(rows_SD, take)  # type: ignore[no-untyped-call]
    return travelled
