"""State of a rank's gradients from step to step: momentum, and values that were not sent yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from geartrain.ams.values.errors import NonFinite, SpecMismatch
from geartrain.bridge.collectives.communicator import Communicator


class GradientState:
    """Tensors [numel] by name of a parameter, with elements in the order of its memory, as in DDP's buckets.

    They are float32, or float64 for a float64 parameter.

    Attributes:
        momentum: u of Lin 2017, for every parameter.
        residual: v, for parameters that are sent sparse, and for others while a loaded residual waits to be sent.
        decay: Momentum of weight decay, equal on every rank, for parameters with a residual.
        sparse: Names of the parameters that are sent sparse, at the latest after the warm-up.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], sparse: set[str], *, decays: bool) -> None:
        """``sparse``: names of the parameters with residuals. ``decays``: whether weights decay."""
        self._parameters = dict(parameters)
        self.sparse = set(sparse)
        self.momentum = {name: _zeros(parameter) for name, parameter in parameters.items()}
        self.residual = {name: _zeros(parameter) for name, parameter in parameters.items() if name in sparse}
        self.decay = {name: _zeros(parameter) for name in self.residual if decays for parameter in [parameters[name]]}
        self.loaded: set[str] = set()
        """Names of parameters with a loaded residual and decay, which all ranks share until the next step."""
        self._kept: list[tuple[Tensor, Tensor]] = []

    def average(self, link: Communicator) -> None:
        """Replace the tensors by their mean over the ranks, which leaves the sum of unsent values as it is."""
        for tensors in (self.momentum, self.residual):
            for tensor in tensors.values():
                tensor.copy_(link.start_sum(tensor).result()).div_(link.world_size)

    def save(self, names: list[str]) -> None:
        """Copy momentum and residuals of ``names`` for :meth:`restore`."""
        both = [tensors[name] for name in names for tensors in (self.momentum, self.residual)]
        self._kept += [(tensor, tensor.clone()) for tensor in both]

    def restore(self) -> None:
        """Overwrite momentum and residuals by the copies."""
        for tensor, kept in self._kept:
            tensor.copy_(kept)
        self._kept = []

    def discard(self) -> None:
        """Drop the copies."""
        self._kept = []

    def shaped(self) -> dict[str, dict[str, Tensor]]:
        """Return the tensors in the shapes of their parameters, as views."""
        return {
            kind: {name: _in_shape(tensor, self._parameters[name]) for name, tensor in tensors.items()}
            for kind, tensors in (("momentum", self.momentum), ("residual", self.residual), ("decay", self.decay))
        }

    def load(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Load the values of :meth:`shaped`.

        Raises SpecMismatch if they are of other parameters, and NonFinite; then nothing is changed.
        """
        self._require_same(saved)
        for mine, theirs in ((self.residual, saved["residual"]), (self.decay, saved["decay"])):
            for name in {*mine} - {*theirs} - self.sparse:  # from an earlier load: equal on all ranks
                del mine[name]
            mine |= {name: _zeros(self._parameters[name]) for name in theirs if name not in mine}
        for kind, tensors in self.shaped().items():
            for name, tensor in tensors.items():
                tensor.zero_() if name not in saved[kind] else tensor.copy_(saved[kind][name])
        self.loaded = {*saved["residual"], *saved["decay"]}
        self.discard()

    def _require_same(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        for names, whose in (
            (set(saved["momentum"]) - set(self._parameters), "the saved state"),
            (set(self._parameters) - set(saved["momentum"]), "this model"),
        ):
            if names:
                raise SpecMismatch(
                    f"{whose} alone has gradients of {', '.join(map(repr, sorted(names)[:5]))}; make the model as the "
                    "saved one was"
                )
        for tensors in saved.values():
            for name, tensor in tensors.items():
                if tensor.shape != self._parameters[name].shape:
                    raise SpecMismatch(
                        f"the saved gradient state of {name!r} has shape {list(tensor.shape)}, the parameter "
                        f"{list(self._parameters[name].shape)}; make the model as the saved one was"
                    )
                if not torch.isfinite(tensor).all():
                    raise NonFinite(
                        f"the saved gradient state of {name!r} holds NaN or infinity; go on from an earlier one"
                    )


def digest_of(saved: Mapping[str, Mapping[str, Any]]) -> int:
    """Return a digest of all values: a positive number of 63 bits."""
    hashed = xxhash.xxh3_64()
    for kind, tensors in sorted(saved.items()):
        for name, tensor in sorted(tensors.items()):
            hashed.update(f"{kind} {name}".encode())
            hashed.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return (hashed.intdigest() >> 1) | 1


def taken_out(tensors: dict[str, Tensor], name: str, *, stays: bool) -> Tensor | None:
    """Remove and return the tensor of ``name``; ``stays``: leave zeros in its place."""
    found = tensors.pop(name, None)
    if found is not None and stays:
        tensors[name] = torch.zeros_like(found)
    return found


def _zeros(parameter: nn.Parameter) -> Tensor:
    dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
    return torch.zeros(parameter.numel(), dtype=dtype, device=parameter.device)


def _in_shape(flat: Tensor, parameter: nn.Parameter) -> Tensor:
    """Return a view of ``flat`` with the parameter's memory layout, or in C order where DDP's buckets have that."""
    like = torch.empty_like(parameter, device="meta")
    return flat.as_strided(like.shape, like.stride())


def in_memory_order(parameter: nn.Parameter) -> Tensor:
    """Return the elements [numel] of a parameter in the order of DDP's buckets."""
    like = torch.empty_like(parameter, device="meta")
    weight = parameter.detach()
    return weight.as_strided((weight.numel(),), (1,)) if like.stride() == weight.stride() else weight.reshape(-1)
