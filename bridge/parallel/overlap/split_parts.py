"""Split linear layer over micro-batches: features of one are gathered while the model computes the next.

The layer works once, on the features of all micro-batches, so that its rows are read once. In the backward pass the
gradients of features are summed while the layer computes those of its rows, and then while the backward pass of the
rest of the model works on another micro-batch, last first, in the order of autograd.

Legend: B rows of features of all ranks, S of one micro-batch of this rank, P micro-batches, D width, C classes, L of
them here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from geartrain.ams.values.errors import InvalidArgument, InvalidRows
from geartrain.ams.values.text import quoted
from geartrain.bridge.collectives.communicator import Communicator
from geartrain.bridge.collectives.cross_entropy import without_autocast
from geartrain.bridge.collectives.part_exchange import GatheredParts, PartSizes, SummedParts, with_travelled_gradient
from geartrain.bridge.parallel.split.layer import autocast_dtype
from geartrain.bridge.parallel.split.linear import SplitLinear
from geartrain.bridge.parallel.split.logits import LogitsOperations, SplitLogits

Operation = tuple[Callable[..., Tensor], tuple[Any, ...], dict[str, Any]]


class PartLogits(LogitsOperations):
    """Placeholder for a micro-batch's logits, which are computed with all others; records the operations on it."""

    def __init__(self, shape: torch.Size, operations: tuple[Operation, ...] = ()) -> None:
        self.shape = shape
        self.operations = operations

    def mapped(
        self, operation: Callable[..., Tensor], arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> PartLogits:
        return PartLogits(self.shape, (*self.operations, (operation, arguments, options)))


class SplitParts:
    """Forward pass over P micro-batches, and :class:`FeatureSink` of its layer meanwhile. Every rank makes one.

    Extra cost over a pass without micro-batches: an exchange of P integers, and one of a number for each of them.
    """

    def __init__(self, layer: SplitLinear, samples: Sequence[int], may_tell: Callable[[], bool]) -> None:
        """``samples``: number in each micro-batch of this rank. ``may_tell()``: whether this rank, after a failure in
        the model, may report it to the others; False while they are in a collective of the model."""
        self._layer, self._samples, self._may_tell = layer, list(samples), may_tell
        self._link = layer.shard.group.link
        self._gradients = _FeatureGradients(self._link)
        self._sizes: PartSizes | None = None
        self._gathered: GatheredParts | None = None
        self._arrived: Tensor | None = None
        self._joined: list[Tensor] = []
        self._operations: list[tuple[Operation, ...]] = []
        self._failure: Exception | None = None

    def compute(self, run: Callable[[], Any]) -> None:
        """Run the model on the next micro-batch, and start to gather its features.

        If that fails on a rank, every rank raises, now or in a later call: that rank its error, the others SyncError.
        """
        self._arrived = None
        try:
            if self._failure is None:
                self._operations.append(self._checked(run()))
        except Exception as exc:  # of any kind: the others wait for this rank
            if self._sizes is None or not self._may_tell():
                raise  # the model reports it, if it can
            self._failure = exc
        if self._sizes is None or self._gathered is None:
            raise InvalidArgument(f"the model did not call its split layer {self._layer.layer_name!r}; call it once")
        part = len(self._joined)
        own_SD = self._arrived
        if own_SD is None:
            own_SD = self._joined[0].new_zeros(self._sizes.of(part)[self._link.rank], self._layer.in_features)
        self._gathered.start_or_fail(part, own_SD.detach(), self._failure)
        self._joined.append(own_SD)

    def logits(self) -> SplitLogits:
        """Return the logits of all micro-batches, in the order of the samples. Raises as :meth:`compute`."""
        assert self._gathered is not None
        assert self._sizes is not None
        joint_BD = self._gathered.whole(self._failure)
        layer = self._layer
        self._gradients.sizes = self._sizes
        local_BL: Tensor = _PartsLinear.apply(  # type: ignore[no-untyped-call]
            joint_BD, layer.local("weight"), layer.local("bias"), self._gradients, *self._joined
        )
        logits = layer.logits(local_BL, [sum(sizes) for sizes in self._sizes.sizes_RP])
        for operation, arguments, options in self._operations[0]:
            logits = logits.mapped(operation, arguments, options)
        layer.agreement.collectives_end()
        return logits

    def arrive(self, features_SD: Tensor) -> PartLogits:
        """Receive the features of a micro-batch. The first call exchanges sizes with the other ranks."""
        layer, part = self._layer, len(self._joined)
        if self._arrived is not None:
            raise InvalidArgument(
                f"split layer {layer.layer_name!r} was called twice in a micro-batch; with micro_batches a model calls "
                "it once"
            )
        if self._sizes is None:
            self._sizes = self._agreed(features_SD)
            self._gathered = GatheredParts(self._link, self._sizes)
        else:
            layer.check(features_SD)
            self._check_alike(features_SD, self._sizes.of(part)[self._link.rank])
        own_SD = layer.travelling(features_SD)
        self._arrived = with_travelled_gradient(own_SD, lambda: self._gradients.collect(part))
        return PartLogits(torch.Size((len(features_SD), layer.out_features)))

    def _agreed(self, features_SD: Tensor) -> PartSizes:
        layer, rows = self._layer, [0]

        def inspect() -> None:
            layer.check(features_SD)
            rows[:] = self._rows(len(features_SD))

        layer.agreement.sizes(layer.layer_name, features_SD, inspect)
        return PartSizes(self._link.exchange(rows), self._link.rank)

    def _rows(self, first: int) -> list[int]:
        """Return the rows of features of each micro-batch, if the first one has this many."""
        samples = self._samples[0]
        if first % max(1, samples) or (first and not samples):
            raise InvalidRows(
                f"split layer {self._layer.layer_name!r} was given {first} rows of features of {samples} samples; with "
                "micro_batches every sample has as many"
            )
        return [size * (first // max(1, samples)) for size in self._samples]

    def _check_alike(self, features_SD: Tensor, expected: int) -> None:
        own, first = self._layer.travelling(features_SD), self._joined[0]
        if len(own) != expected or own.dtype != first.dtype or own.requires_grad != first.requires_grad:
            raise InvalidRows(
                f"split layer {self._layer.layer_name!r} was given {len(own)} rows of {own.dtype} in micro-batch "
                f"{len(self._joined)}; after the first one {expected} of {first.dtype} were expected, "
                f"{'with' if first.requires_grad else 'without'} a gradient"
            )

    def _checked(self, output: Any) -> tuple[Operation, ...]:
        if not isinstance(output, PartLogits) or self._arrived is None:
            raise InvalidArgument(
                f"the model returned {quoted(output)}; with micro_batches it returns the logits of its split layer "
                f"{self._layer.layer_name!r}, as they are or times, plus ... a number"
            )
        if self._operations and output.operations != self._operations[0]:
            raise InvalidArgument(
                "the model works on its logits with other numbers in each micro-batch; it must do the same to all"
            )
        return output.operations


class _FeatureGradients:
    """Gradients by this rank's features, by micro-batch, being summed over all ranks."""

    def __init__(self, link: Communicator) -> None:
        self._link = link
        self.sizes: PartSizes | None = None
        self._summed: SummedParts | None = None

    def start(self, by_features_BD: Tensor) -> None:
        """Start to sum the gradients, the last micro-batch's first."""
        assert self.sizes is not None
        order = reversed(range(self.sizes.num_parts))
        self._summed = SummedParts(self._link, self.sizes, by_features_BD, order)

    def collect(self, part: int) -> Tensor:
        """Return the gradients of a micro-batch [S, D], scaled as in ``travel.py``. Raises RankLost."""
        assert self._summed is not None
        own_SD = self._summed.collect(part)
        return own_SD * self._link.world_size if self._link.world_size > 1 else own_SD


class _PartsLinear(torch.autograd.Function):
    """``F.linear`` of gathered features, as a function of ``joined``, each micro-batch's own features."""

    @staticmethod
    def forward(
        ctx: Any, joint_BD: Tensor, weight_LD: Tensor, bias_L: Tensor | None, gradients: Any, *joined: Any
    ) -> Tensor:
        ctx.gradients, ctx.dtype = gradients, weight_LD.dtype
        ctx.like = [(features.shape, features.dtype) for features in joined]
        casts = autocast_dtype(joint_BD.device) is not None and joint_BD.dtype.itemsize < weight_LD.dtype.itemsize
        with without_autocast(joint_BD.device):
            if casts:
                weight_LD = weight_LD.to(joint_BD.dtype)
                bias_L = None if bias_L is None else bias_L.to(joint_BD.dtype)
            ctx.save_for_backward(joint_BD, weight_LD)
            local_BL: Tensor = F.linear(joint_BD, weight_LD, bias_L)
        return local_BL

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BL: Tensor) -> tuple[Any, ...]:
        joint_BD, weight_LD = ctx.saved_tensors
        _, of_weight, of_bias, _, *of_features = ctx.needs_input_grad
        by_weight_LD = by_bias_L = None
        with without_autocast(gradient_BL.device):
            if any(of_features):
                by_features_BD = gradient_BL @ weight_LD
                ctx.gradients.start(by_features_BD.float() if by_features_BD.dtype.itemsize < 4 else by_features_BD)
            if of_weight:
                by_weight_LD = (gradient_BL.t() @ joint_BD).to(ctx.dtype)
            if of_bias:
                by_bias_L = gradient_BL.sum(0).to(ctx.dtype)
        nothing = gradient_BL.new_zeros(())
        none = (nothing.to(dtype).expand(shape) for shape, dtype in ctx.like)
        return None, by_weight_LD, by_bias_L, None, *none
