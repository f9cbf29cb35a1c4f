"""Ranks that are not there: a step that would be theirs runs alone, on the meta device, and says what it would send."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from geartrain.bridge.collectives.communicator import Communicator, Pending, Traffic
from geartrain.bridge.parallel.plan.costs.collectives import FEATURE_GRADIENTS, FEATURES, Kind
from geartrain.bridge.parallel.plan.costs.trace import StepTrace

_INTEGER_BYTES = 8


class DryLink(Communicator):
    """Rank 0 of ``world_size`` ranks that all do the same; nothing travels, ``trace`` notes what would.

    The bytes of a collective are those that :class:`Communicator` counts.
    """

    def __init__(self, world_size: int, trace: StepTrace) -> None:  # no process group: nothing of Communicator's
        self.world_size, self.rank = world_size, 0
        self.traffic = Traffic()
        self._trace = trace

    def exchange(self, values: Sequence[int]) -> list[list[int]]:
        """As if every rank gave the same."""
        self._note("all-gather", len(values) * _INTEGER_BYTES * self.world_size, "sizes and checks", on_host=True)
        return [list(values)] * self.world_size

    def start_exchange(self, values: Sequence[int], operation: str = "all-gather") -> Pending[list[list[int]]]:
        """As :meth:`exchange`."""
        del operation
        return Pending.done(self.exchange(values))

    def gather_json(self, value: Any) -> list[Any]:
        """As if every rank gave the same; what is said once, as layers are made, is not counted."""
        return [value] * self.world_size

    def start_gather(self, tensor: Tensor, sizes: Sequence[int]) -> Pending[Tensor]:
        """[Σ n_r, …] of nothing."""
        width = tensor[:0].new_empty(1, *tensor.shape[1:]).nbytes
        self._note("all-gather", max(sizes) * self.world_size * width, _named(tensor))
        return Pending.done(tensor.new_empty(sum(sizes), *tensor.shape[1:]))

    def start_sum_to_owners(self, tensor_BD: Tensor, sizes: Sequence[int]) -> Pending[Tensor]:
        """[n_0, D] of nothing."""
        rows = max(sizes) * self.world_size
        self._note("reduce-scatter", rows * tensor_BD[:1].nbytes, FEATURE_GRADIENTS)
        return Pending.done(tensor_BD.new_empty(sizes[0], *tensor_BD.shape[1:]))

    def all_to_all(self, values: Tensor, leaving: Sequence[int], arriving: Sequence[int]) -> Tensor:
        """Σ ``arriving`` numbers of nothing."""
        del leaving
        self._note("all-to-all", sum(arriving) * values.element_size(), "logits of the own samples")
        return values.new_empty(sum(arriving))

    def _reduced(self, tensor: Tensor, operation: Any) -> Tensor:
        del operation
        self._note("all-reduce", tensor.nbytes, "numbers of the softmax")
        return tensor.new_empty(tensor.shape)

    def _note(self, kind: Kind, num_bytes: int, what: str, *, on_host: bool = False) -> None:
        if self.world_size > 1:
            self._trace.note_collective(kind, what, num_bytes, self.world_size, on_host=on_host)


def _named(tensor: Tensor) -> str:
    if tensor.dtype.is_floating_point:
        return FEATURES if tensor.ndim > 1 else "numbers of samples"
    return "labels or ids"
