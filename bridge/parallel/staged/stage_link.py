"""What senders and owners say to each other in a step.

Every step has two exchanges of a few integers between all hosts: one when the senders have their features, by which the
owners learn how many come and of what dtype, one when the owners have their answer. Whoever fails before says so there,
so that every rank raises. Samples and their gradients go point to point.

Legend: B samples of all senders, D width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from geartrain.ams.values.errors import SpecMismatch, SyncError
from geartrain.bridge.collectives.communicator import Communicator
from geartrain.bridge.parallel.mesh import Mesh

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class SampleSpan:
    """Consecutive samples of one sender that one owner takes."""

    sender: int
    owner: int
    num: int
    """How many, at least 1."""
    at_sender: int
    """Where they begin among the samples of the sender."""
    at_owner: int
    """Where they begin among those that the owner takes."""


@dataclass(frozen=True)
class StagedBatch:
    """The samples of one step, as all ranks agreed on them."""

    asks_for_loss: bool
    """Else for logits."""
    dtype: torch.dtype
    """Of the features."""
    spans: Sequence[SampleSpan]
    """Those that this rank sends or takes."""
    num_taken: int
    """Samples that this owner takes."""
    wants_gradient: bool
    """Whether the features are to have one."""


@dataclass(frozen=True)
class StageLink:
    """Senders and owners of one model: the first and the second stage of ``mesh``."""

    mesh: Mesh

    @property
    def link(self) -> Communicator:
        """All ranks."""
        return self.mesh.whole.link

    @property
    def senders(self) -> Sequence[int]:
        """Ranks of the first stage."""
        return self.mesh.stages[0]

    @property
    def owners(self) -> Sequence[int]:
        """Ranks of the second one."""
        return self.mesh.stages[1]

    @property
    def is_sender(self) -> bool:
        """Whether this rank is."""
        return self.mesh.own_stage == 0

    def begin(
        self, failure: Exception | None, features_SD: Tensor | None, *, asks_for_loss: bool = False
    ) -> StagedBatch:
        """Agree on the samples of a step: one exchange. Owners give no features, and learn what is asked for.

        Raises:
            SyncError: another rank gave a ``failure``; it is raised here if it is this one's.
            SpecMismatch: the ranks disagree.
        """
        numbers = [0, 0, 0]
        if features_SD is not None:
            numbers = [len(features_SD), _DTYPES.index(features_SD.dtype), features_SD.requires_grad]
        answers = self.link.exchange([failure is None, asks_for_loss, torch.is_grad_enabled(), *numbers])
        if failure is not None:
            raise failure
        sound, purposes, modes, lengths, dtypes, wanted = zip(*answers, strict=True)
        if 0 in sound:
            raise SyncError(f"the step did not begin: rank {sound.index(0)} failed; its error tells why")
        first = self.senders[0]
        _require_one("whether labels are given", purposes, self.senders)
        _require_one("the dtype of features", dtypes, self.senders)
        if purposes[first]:
            _require_one("torch.no_grad()", modes, range(len(answers)))
            _require_one("whether features have a gradient", wanted, self.senders)
        sizes = [lengths[rank] for rank in self.senders]
        number = (self.senders if self.is_sender else self.owners).index(self.link.rank)
        spans = deal(sizes, len(self.owners))
        return StagedBatch(
            asks_for_loss=bool(purposes[first]),
            dtype=_DTYPES[dtypes[first]],
            spans=[span for span in spans if (span.sender if self.is_sender else span.owner) == number],
            num_taken=sum(span.num for span in spans if span.owner == number),
            wants_gradient=bool(purposes[first] and modes[first] and wanted[first]),
        )

    def tell(self, failure: Exception) -> None:
        """Tell the others, who wait for this rank in :meth:`begin`, that it failed."""
        with contextlib.suppress(type(failure)):
            self.begin(failure, None)

    def answer(self, failure: Exception | None, dtype: torch.dtype | None) -> torch.dtype:
        """Wait until the owners have what the senders asked for; its dtype, which owners give. One exchange.

        Raises SyncError if an owner gave a ``failure``, which it raises itself.
        """
        answers = self.link.exchange([failure is None, 0 if dtype is None else _DTYPES.index(dtype)])
        if failure is not None:
            raise failure
        sound = [good for good, _ in answers]
        if 0 in sound:
            raise SyncError(f"the step did not end: rank {sound.index(0)} failed; its error tells why")
        return _DTYPES[answers[self.owners[0]][1]]

    def give(self, spans: Sequence[SampleSpan], *rows: Tensor) -> None:
        """Send the rows of the spans, of each tensor [S, …], to those at their other ends."""
        cut = [(part.contiguous(), rank) for part, rank in self._cut(spans, rows)]
        self.link.start_transfers(cut, []).result()

    def take(self, spans: Sequence[SampleSpan], *rooms: Tensor) -> None:
        """Write what :meth:`give` sends at the other ends to the rows of the spans in ``rooms`` [S, …]."""
        cut = self._cut(spans, rooms)
        self.link.start_transfers([], cut).result()

    def _cut(self, spans: Sequence[SampleSpan], rows: Sequence[Tensor]) -> list[tuple[Tensor, int]]:
        places = [span.at_sender if self.is_sender else span.at_owner for span in spans]
        return [
            (tensor[place : place + span.num], rank)
            for span, place, rank in zip(spans, places, self._others(spans), strict=True)
            for tensor in rows
        ]

    def _others(self, spans: Sequence[SampleSpan]) -> list[int]:
        return [self.owners[span.owner] if self.is_sender else self.senders[span.sender] for span in spans]


def _require_one(what: str, values: Sequence[int], ranks: Sequence[int]) -> None:
    unlike = [rank for rank in ranks if values[rank] != values[ranks[0]]]
    if unlike:
        raise SpecMismatch(
            f"rank {ranks[0]} and rank {unlike[0]} disagree on {what}; call the model in the same way on every "
            "rank of a stage"
        )


def deal(sizes: Sequence[int], num_owners: int) -> list[SampleSpan]:
    """Share the samples of senders, ``sizes`` of each, among the owners, in order and as evenly as can be.

    There are at most senders + owners - 1 spans. The owners' samples, one owner behind the other, are those of the
    senders in their order.
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
