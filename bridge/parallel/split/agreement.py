"""Agreement of the ranks before the collectives of a split layer or a loss: whether all can start."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from geartrain.ams.values.errors import SpecMismatch, SyncError
from geartrain.bridge.collectives.communicator import Communicator

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32)
_WHAT = ("the layer", "the width", "the dtype")
_WHETHER = ("whether a gradient is wanted", "whether labels are given", "whether they train (model.train())")
_NOTHING = [0] * (2 + len(_WHAT))

LOSS, WHOLE, END = "the loss", "all classes of the own samples", "the end of the step"
BUFFERS = "the buffers of rank 0"
_MEETINGS = (LOSS, WHOLE, END, BUFFERS)
"""Meeting points of the ranks besides the split layers."""


class StepAgreement:
    """Agreement of a model's ranks; its split layers get the ranks' numbers of samples from it. Not thread-safe.

    Ranks meet in an exchange before the collectives of each split layer and of a loss, and at the end of a step. A rank
    that fails in between reports it where the others wait (:meth:`announce_failure`), so that all of them raise.
    """

    def __init__(self, link: Communicator) -> None:
        self._link = link
        self._others_ask_next = False
        """Whether the other ranks' next collective is an exchange of this."""
        self._has_labels = self._trains = False
        self.layers: list[str] = list(_MEETINGS)
        """Meeting points, then names of the split layers, the same on every rank."""

    @property
    def has_layers(self) -> bool:
        """Whether a layer is split."""
        return len(self.layers) > len(_MEETINGS)

    def start_forward(self, *, has_labels: bool = True, trains: bool = True) -> None:
        """Start a forward pass. Ranks must agree on both flags: they decide which collectives follow."""
        self._others_ask_next = True
        self._has_labels, self._trains = has_labels, trains

    def finish_forward(self) -> None:
        """End a forward pass."""
        self._others_ask_next = False

    def sizes(self, layer: str, samples: Tensor, check: Callable[[], None]) -> list[int]:
        """Return the rows of ``samples`` [n, …] on each rank. One exchange of six integers between the hosts.

        ``check()`` raises an error in them. Raises that error, SyncError if it is another rank's, and SpecMismatch if
        ranks are at different layers or have different samples.
        """
        try:
            check()
        except Exception as exc:  # of any kind: the others wait for this rank
            return self._exchange(exc, _NOTHING)
        width = samples.shape[1:].numel()
        dtype = _DTYPES.index(samples.dtype) if samples.dtype in _DTYPES else len(_DTYPES)
        wants_gradient = torch.is_grad_enabled() and (samples.requires_grad or not samples.dtype.is_floating_point)
        flags = [wants_gradient, self._has_labels, self._trains]
        packed = sum(flag << place for place, flag in enumerate(flags))
        return self._exchange(None, [len(samples), self.layers.index(layer), width, dtype, packed])

    def agree(self, where: str, check: Callable[[], None] = lambda: None) -> None:
        """Raise on every rank if ``check()`` does on any, or if they are not all at the meeting point ``where``."""
        self.sizes(where, torch.empty(0), check)

    def collectives_end(self) -> None:
        """Record the end of the collectives after the last exchange: until the next one, this rank can report a
        failure."""
        self._others_ask_next = True

    def announce_failure(self, failure: Exception) -> None:
        """Report an error between collectives to the others. Ranks already in a collective wait for this one
        instead."""
        if self._others_ask_next:
            self._exchange(failure, _NOTHING)

    def _exchange(self, failure: Exception | None, numbers: list[int]) -> list[int]:
        self._others_ask_next = False
        answers = self._link.exchange([failure is None, *numbers])
        if failure is not None:
            raise failure
        sound = [good for good, *_ in answers]
        if 0 in sound:
            raise SyncError(f"the step was not made: rank {sound.index(0)} failed; its error tells why")
        first = _compared(answers[0])
        for rank, numbers in enumerate(answers):
            theirs = _compared(numbers)
            unlike = [what for what, value in first.items() if theirs[what] != value]
            if unlike:
                raise SpecMismatch(
                    f"rank 0 and rank {rank} disagree on {' and '.join(unlike)} of what they compute. Run the same "
                    "model in the same mode on every rank, with inputs of the same dtype"
                )
        return [size for _, size, *_ in answers]


def _compared(answers: list[int]) -> dict[str, int]:
    """Return the values that must be equal on all ranks, by name."""
    _, _, *numbers, flags = answers
    whether = {what: flags >> place & 1 for place, what in enumerate(_WHETHER)}
    return {**dict(zip(_WHAT, numbers, strict=True)), **whether}
