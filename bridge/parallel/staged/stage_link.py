"""Communication of two neighbouring stages in a step: from senders to owners, the ranks of the next stage.

For every micro-batch, once the senders have their rows, the hosts of all exchange a few integers, from which the owners
learn the number, dtype and shape of the samples. A rank that failed before reports it there, so that all ranks of both
stages raise. Samples and gradients are sent point to point.

Legend: S samples of a sender, D the rest of the shape.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from geartrain.ams.values.errors import SpecMismatch, SyncError
from geartrain.bridge.collectives.communicator import Communicator
from geartrain.bridge.parallel.staged.distant import MAX_DIMENSIONS

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
KIND = MAX_DIMENSIONS
"""Number of integers of :func:`kind_of`."""


def kind_of(rows: Tensor) -> list[int]:
    """Return dtype and shape of one sample of ``rows`` [S, …], as integers."""
    shape = list(rows.shape[1:])
    return [_DTYPES.index(rows.dtype), *shape, *[0] * (KIND - 1 - len(shape))]


def kind_from(numbers: Sequence[int]) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return the dtype and shape from :func:`kind_of`."""
    return _DTYPES[numbers[0]], tuple(size for size in numbers[1:] if size)


@dataclass(frozen=True)
class SampleSpan:
    """Consecutive samples of one sender that go to one owner."""

    sender: int
    owner: int
    num: int
    """Number of samples, at least 1."""
    at_sender: int
    """Position of the first among the samples of the sender."""
    at_owner: int
    """Position of the first among those that the owner receives."""


@dataclass(frozen=True)
class StagedBatch:
    """Agreement of the ranks of two stages on the samples of one micro-batch."""

    asks_for_loss: bool
    """Whether the step computes the loss; False: the last stage's output."""
    is_last: bool
    """Whether it is the last of the step."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Shape of one sample."""
    spans: Sequence[SampleSpan]
    """Spans that this rank sends or receives."""
    num_taken: int
    """Number of samples that this owner receives."""
    wants_gradient: bool
    """Whether the samples need a gradient."""


class StageLink:
    """Link between the ranks of a stage (senders) and those of the next (owners). Not thread-safe.

    Attributes:
        link: Communicator of all of them.
        senders: Their numbers among all ranks.
        owners: Their numbers among all ranks.
        culprit: Rank whose failure was reported on this link in this step; None: none was.
    """

    def __init__(self, link: Communicator, rank: int, senders: Sequence[int], owners: Sequence[int]) -> None:
        """``rank`` is this rank; ``link`` connects senders and owners, in the order of their numbers."""
        self.link, self.senders, self.owners = link, senders, owners
        self._rank, self._ranks = rank, sorted([*senders, *owners])
        self.open()

    def open(self) -> None:
        """Start a step."""
        self.culprit: int | None = None
        self._is_awaited = True
        """Whether the other stage will take part in another exchange in this step."""

    @property
    def is_sender(self) -> bool:
        """Whether this rank is a sender."""
        return self._rank in self.senders

    def agree(self, rows_SD: Tensor | None, *, asks_for_loss: bool = False, is_last: bool = True) -> StagedBatch:
        """Agree on a micro-batch: one exchange. Owners pass None, and learn what the senders ask for.

        Raises:
            SyncError: another rank failed.
            SpecMismatch: the ranks disagree.
        """
        numbers = [0] * (2 + KIND)
        if rows_SD is not None:
            numbers = [len(rows_SD), rows_SD.requires_grad, *kind_of(rows_SD)]
        answers = self._exchange(0, [asks_for_loss, is_last, torch.is_grad_enabled(), *numbers])
        givers = [self._ranks.index(rank) for rank in self.senders]
        purposes, lasts, modes, lengths, wanted, *kinds = zip(*answers, strict=True)
        first = givers[0]
        self._require_one("whether labels are given", purposes, givers)
        self._require_one("the dtype of features", kinds[0], givers)
        for sizes in kinds[1:]:
            self._require_one("the shape of features", sizes, givers)
        if purposes[first]:
            self._require_one("torch.no_grad()", modes, range(len(answers)))
            self._require_one("whether features have a gradient", wanted, givers)
        self._is_awaited = not lasts[first]
        dtype, shape = kind_from([numbers[first] for numbers in kinds])
        number = (self.senders if self.is_sender else self.owners).index(self._rank)
        spans = deal([lengths[giver] for giver in givers], len(self.owners))
        return StagedBatch(
            asks_for_loss=bool(purposes[first]),
            is_last=bool(lasts[first]),
            dtype=dtype,
            shape=shape,
            spans=[span for span in spans if (span.sender if self.is_sender else span.owner) == number],
            num_taken=sum(span.num for span in spans if span.owner == number),
            wants_gradient=bool(purposes[first] and modes[first] and wanted[first]),
        )

    def report(self, culprit: int) -> None:
        """Report the failure of a rank to the others, if they take part in another exchange in this step."""
        if self._is_awaited:
            with contextlib.suppress(SyncError):  # the caller raises the reported error
                self._exchange(culprit + 1, [0] * (5 + KIND))

    def _exchange(self, failed: int, numbers: Sequence[int]) -> list[list[int]]:
        self._is_awaited = False
        answers = self.link.exchange([failed, *numbers])
        culprits = [failed - 1 for failed, *_ in answers if failed]
        if culprits:
            self.culprit = culprits[0]
            raise SyncError(f"the step did not begin: rank {self.culprit} failed; its error tells why")
        return [numbers for _, *numbers in answers]

    def send(self, spans: Sequence[SampleSpan], *rows: Tensor) -> None:
        """Send each span's rows, of every tensor [S, …], to the rank at its other end."""
        cut = [(part.contiguous(), rank) for part, rank in self._cut(spans, rows)]
        self.link.start_transfers(cut, []).result()

    def receive(self, spans: Sequence[SampleSpan], *rooms: Tensor) -> None:
        """Receive each span's rows from the rank at its other end into ``rooms`` [S, …]."""
        cut = self._cut(spans, rooms)
        self.link.start_transfers([], cut).result()

    def _cut(self, spans: Sequence[SampleSpan], rows: Sequence[Tensor]) -> list[tuple[Tensor, int]]:
        found = []
        for span in spans:
            place = span.at_sender if self.is_sender else span.at_owner
            other = self.owners[span.owner] if self.is_sender else self.senders[span.sender]
            found += [(tensor[place : place + span.num], self._ranks.index(other)) for tensor in rows]
        return found

    def _require_one(self, what: str, values: Sequence[int], places: Sequence[int]) -> None:
        unlike = [place for place in places if values[place] != values[places[0]]]
        if unlike:
            raise SpecMismatch(
                f"rank {self._ranks[places[0]]} and rank {self._ranks[unlike[0]]} disagree on {what}; call the model "
                "in the same way on every rank of a stage"
            )


def deal(sizes: Sequence[int], num_owners: int) -> list[SampleSpan]:
    """Divide the samples of senders, ``sizes`` of each, among the owners, as evenly as possible.

    The owners' samples, one owner after the other, are in the order of the senders'. Returns at most senders + owners
    - 1 spans.
    """
    total = sum(sizes)
    found = []
    first = 0  # of this sender, among all samples
    for sender, size in enumerate(sizes):
        for owner in range(num_owners):
            begin, end = (total * number // num_owners for number in (owner, owner + 1))
            start, stop = max(first, begin), min(first + size, end)
            if start < stop:
                found.append(SampleSpan(sender, owner, stop - start, at_sender=start - first, at_owner=start - begin))
        first += size
    return found
