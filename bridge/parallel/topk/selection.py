"""How many elements of a gradient travel, and which: the state that they leave behind is updated in the same call.

Deep gradient compression (Lin 2017, section 3): momentum correction, accumulation of what was not sent, and masking of
what was.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from geartrain.ams.values.errors import InvalidArgument, NonFinite
from geartrain.bridge.parallel.topk.compaction import Compaction, CompiledCompaction, TensorCompaction

_ROLES = ("gradient", "velocity", "residual")
_REMEDIES = {
    "gradient": "skip this step, as torch.amp.GradScaler does",
    "velocity": "go on from a snapshot, or set it to 0",
    "residual": "go on from a snapshot, or set it to 0",
}
GRADIENT_TYPES = (torch.float32, torch.float16, torch.bfloat16)
MOST_ELEMENTS = 2**31 - 1
"""Of a tensor: indices travel as int32."""


def counts(numels: Sequence[int], sparsity: float, *, ranks: int = 2) -> list[int]:
    """How many elements of each tensor to send: ``numel`` where it had better be sent dense.

    k = max(1, ⌈numel · (1 − sparsity)⌉), with ``sparsity`` as it is written: 0.999 leaves one in 1000. A rank receives
    8 · k bytes (int32 index, float32 value) from each other rank; of a dense all-reduce it receives
    8 · numel / ranks bytes for each of them. So a tensor is dense where k · max(ranks, 2) >= numel.

    Raises:
        InvalidArgument: ``sparsity`` is outside [0, 1), a tensor has 2**31 elements or more, or ``ranks`` < 1.
    """
    if not 0 <= sparsity < 1:
        raise InvalidArgument(f"sparsity is {sparsity}; it must lie in [0, 1): 0.999 sends one element in 1000")
    if ranks < 1:
        raise InvalidArgument(f"ranks is {ranks}; it must be at least 1")
    kept = 1 - Fraction(repr(float(sparsity)))
    return [_count(numel, kept, ranks) for numel in numels]


def _count(numel: int, kept: Fraction, ranks: int) -> int:
    if not 0 <= numel <= MOST_ELEMENTS:
        raise InvalidArgument(f"a tensor has {numel} elements; sparsified ones have at most {MOST_ELEMENTS}")
    k = max(1, -(-numel * kept.numerator // kept.denominator))
    return numel if k * max(ranks, 2) >= numel else k


class GradientCompactor:
    """Accumulates gradients and takes the largest of what has gathered, for many tensors in one call.

    Made once for tensors of given sizes. Tensors of a CPU are swept by compiled code, others by tensor operations.
    """

    def __init__(self, numels: Sequence[int], ks: Sequence[int], *, names: Sequence[str] | None = None) -> None:
        """Tensors of so many elements, how many to select of each, and what errors call them.

        Raises:
            InvalidArgument: the lists differ in length, or a k is outside [1, numel] (0 for an empty tensor).
        """
        if not len(numels) == len(ks) == len(names if names is not None else numels):
            raise InvalidArgument(
                f"there are {len(numels)} numels, {len(ks)} ks and {len(names or ())} names; there must be one of each"
                " for every tensor"
            )
        self._names = list(names) if names is not None else [f"tensor {number}" for number in range(len(numels))]
        for name, numel, k in zip(self._names, numels, ks, strict=True):
            if not min(1, numel) <= k <= numel <= MOST_ELEMENTS:
                raise InvalidArgument(
                    f"{k} of the {numel} elements of {name} are to be selected; it must hold that"
                    f" 1 <= k <= numel <= {MOST_ELEMENTS}; see counts()"
                )
        self.numels, self.ks = list(numels), list(ks)
        self._compactions: dict[torch.device, Compaction] = {}

    @torch.no_grad()
    def accumulate_and_select(
        self,
        gradients: Sequence[Tensor],
        velocities: Sequence[Tensor],
        residuals: Sequence[Tensor],
        *,
        momentum: float,
        scale: float = 1.0,
        nesterov: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Update the state of each tensor with its gradient, and take the k largest magnitudes out of it.

        u = momentum · u + scale · g;  v = v + u, with ``nesterov`` v = v + scale · g + momentum · u, as in
        ``torch.optim.SGD``. At the selected places u = v = 0. Where magnitudes are equal, the lower index is selected.

        A device is asked once, by a host sync, whether all is finite.

        Args:
            gradients: g, float32, float16 or bfloat16, of any shape; elements count in C order.
            velocities: u, float32, contiguous; changed in place.
            residuals: v, float32, contiguous; changed in place.
            momentum: 0 for plain accumulation.
            scale: of the gradients.
            nesterov: look ahead.

        Returns:
            The indices int32 [K] within each tensor, K = Σ k, one tensor after the other, rising in each; and what v
            was there, float32 [K].

        Raises:
            NonFinite: a gradient, a velocity or a residual holds NaN or infinity, or would exceed float32. The message
                names the tensor. Velocities and residuals are of no use then: put back what they were.
            InvalidArgument: ``momentum`` or ``scale`` is not finite, or a tensor has another number of elements,
                another type or layout, or is on another device.
        """
        for name, value in (("momentum", momentum), ("scale", scale)):
            if not math.isfinite(value):
                raise InvalidArgument(f"{name} is {value}; it must be finite")
        self._require_fitting(gradients, velocities, residuals)
        if not self.numels:
            return torch.zeros(0, dtype=torch.int32), torch.zeros(0)
        try:
            return self._compaction_on(residuals[0].device).take(
                gradients, velocities, residuals, momentum=momentum, scale=scale, nesterov=nesterov
            )
        except NonFinite as error:
            raise self._not_finite(gradients, velocities, residuals) from error

    def _compaction_on(self, device: torch.device) -> Compaction:
        if device not in self._compactions:
            self._compactions[device] = (
                CompiledCompaction(self.numels, self.ks)
                if device.type == "cpu"
                else TensorCompaction(self.numels, self.ks, device)
            )
        return self._compactions[device]

    def _require_fitting(self, *lists: Sequence[Tensor]) -> None:
        device = lists[-1][0].device if lists[-1] else None
        for role, tensors in zip(_ROLES, lists, strict=True):
            if len(tensors) != len(self.numels):
                raise InvalidArgument(f"{len(tensors)} {role} tensors were given; there are {len(self.numels)}")
            for name, numel, tensor in zip(self._names, self.numels, tensors, strict=True):
                if tensor.numel() != numel or tensor.device != device:
                    raise InvalidArgument(
                        f"the {role} of {name} has {tensor.numel()} elements on {tensor.device};"
                        f" it must have {numel} on {device}"
                    )
                allowed = GRADIENT_TYPES if role == "gradient" else GRADIENT_TYPES[:1]
                if tensor.dtype not in allowed or (role != "gradient" and not tensor.is_contiguous()):
                    raise InvalidArgument(
                        f"the {role} of {name} is {tensor.dtype}{'' if tensor.is_contiguous() else ', not contiguous'};"
                        f" it must be {' or '.join(str(one) for one in allowed)}, velocities and residuals contiguous"
                    )

    def _not_finite(self, *lists: Sequence[Tensor]) -> NonFinite:
        """Say what is not finite; their sums where each of them is."""
        for role, tensors in zip(_ROLES, lists, strict=True):
            for name, tensor in zip(self._names, tensors, strict=True):
                bad = int((~torch.isfinite(tensor)).sum())
                if bad:
                    return NonFinite(
                        f"the {role} of {name} holds NaN or infinity at {bad} of {tensor.numel()} places: "
                        f"{_REMEDIES[role]}"
                    )
        largest = [
            max(float(tensor.abs().max()) if tensor.numel() else 0.0 for tensor in tensors)
            for tensors in zip(*lists, strict=True)
        ]
        name = self._names[largest.index(max(largest))]
        return NonFinite(f"the residual of {name} would exceed float32: clip gradients or lower the rate")
