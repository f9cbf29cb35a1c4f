"""``nn.Linear`` split by output features.

Per training step: one exchange of six integers between the hosts, an all-gather of B·D numbers (in the type that
autocast computes in), and a reduce-scatter of B·D in the backward pass; the loss adds another exchange and what
``cross_entropy.py`` says.
Time O(B·D·C / R). Memory: C·D / R parameters, B·D features, B·C / R logits once.

Legend: B samples of all ranks, S of this one, C output features, L of them here, D input features, R ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from geartrain.bridge.parallel.mesh import MeshGroup
from geartrain.bridge.parallel.split.agreement import StepAgreement
from geartrain.bridge.parallel.split.kept_memory import KeptMemory
from geartrain.bridge.parallel.split.layer import SplitLayer, autocast_dtype, check_floating
from geartrain.bridge.parallel.split.logits import SplitLogits
from geartrain.bridge.parallel.split.travel import all_samples


class LinearMemory(NamedTuple):
    """What a layer keeps from step to step besides its parameters."""

    logits: KeptMemory
    gradient: KeptMemory

    def product(self, features_BD: Tensor, weight_LD: Tensor, bias_L: Tensor | None) -> Tensor:
        """``F.linear`` outside of autograd."""
        local_BL = self.logits.empty((len(features_BD), len(weight_LD)), weight_LD)
        if bias_L is None:
            return torch.mm(features_BD, weight_LD.t(), out=local_BL)
        return torch.addmm(bias_L, features_BD, weight_LD.t(), out=local_BL)

    def gradient_by_weight(self, gradient_BL: Tensor, features_BD: Tensor) -> Tensor:
        """[L, D], of the gradient by the logits."""
        out_LD = self.gradient.empty((gradient_BL.shape[1], features_BD.shape[1]), gradient_BL)
        return torch.mm(gradient_BL.t(), features_BD, out=out_LD)


class FeatureSink(Protocol):
    """Takes the features of a micro-batch instead of the layer, which works on those of all together."""

    def arrive(self, features_SD: Tensor) -> Any:
        """What the layer returns for them: something that stands for their logits."""


class _Linear(torch.autograd.Function):
    """``F.linear``; logits and the gradient by the weight lie in memory that is used again."""

    @staticmethod
    def forward(
        ctx: Any, features_BD: Tensor, weight_LD: Tensor, bias_L: Tensor | None, memory: LinearMemory
    ) -> Tensor:
        ctx.save_for_backward(features_BD, weight_LD)
        ctx.memory = memory
        return memory.product(features_BD, weight_LD, bias_L)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BL: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        features_BD, weight_LD = ctx.saved_tensors
        of_features, of_weight, of_bias, _ = ctx.needs_input_grad
        by_features_BD = by_weight_LD = None
        if of_features:
            by_features_BD = gradient_BL @ weight_LD
        if of_weight:
            by_weight_LD = ctx.memory.gradient_by_weight(gradient_BL, features_BD)
        return by_features_BD, by_weight_LD, gradient_BL.sum(0) if of_bias else None, None


class SplitLinear(SplitLayer):
    """An ``nn.Linear`` whose output features lie on several ranks; gives :class:`SplitLogits`.

    Attributes: ``weight`` [C, D] and ``bias`` [C] or None, see :class:`SplitLayer`; ``in_features``, ``out_features``.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        name: str,
        linear: nn.Linear,
        weight_LD: Tensor,
        bias_L: Tensor | None,
        group: MeshGroup,
        agreement: StepAgreement,
    ) -> None:
        """``weight_LD`` and ``bias_L`` are this rank's rows of those of ``linear``."""
        super().__init__(name, linear.out_features, group, agreement)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.add_rows("weight", linear.weight, weight_LD)
        self.add_rows("bias", linear.bias, bias_L)
        self.memory = LinearMemory(KeptMemory(), KeptMemory())
        self.sink: FeatureSink | None = None
        """Where features go while a step is made of micro-batches."""

    def forward(self, features_SD: Tensor) -> Any:
        """Logits (:class:`SplitLogits`) of features [S, D].

        Raises InvalidRows for features that do not fit, SyncError where they do not on another rank, SpecMismatch
        where ranks differ.
        """
        if self.sink is not None:
            return self.sink.arrive(features_SD)
        link = self.shard.group.link

        sizes = self.agreement.sizes(self.layer_name, features_SD, lambda: self.check(features_SD))
        own_SD = self.travelling(features_SD)
        features_BD = all_samples(own_SD, link.start_gather(own_SD, sizes), link, sizes)
        weight_LD = self.local("weight")
        assert weight_LD is not None
        logits = self.logits(self._product(features_BD, weight_LD, self.local("bias")), sizes)
        self.agreement.collectives_end()
        return logits

    def check(self, features_SD: Tensor) -> None:
        """Raise InvalidRows for features that do not fit."""
        check_floating(features_SD, self.in_features, self.layer_name)

    def travelling(self, features_SD: Tensor) -> Tensor:
        """The features in the type that they travel in: that of autocast, if it is on and narrower."""
        dtype = autocast_dtype(features_SD.device)
        return features_SD if dtype is None or features_SD.dtype.itemsize > 4 else features_SD.to(dtype)

    def logits(self, local_BL: Tensor, sizes: list[int]) -> SplitLogits:
        """What the layer returns, of its own classes' logits of the samples of all ranks."""
        return SplitLogits(local_BL, sizes, self.shard, self.agreement)

    def _product(self, features_BD: Tensor, weight_LD: Tensor, bias_L: Tensor | None) -> Tensor:
        device = features_BD.device
        keeps = device.type in ("cpu", "meta") and autocast_dtype(device) is None and torch.is_grad_enabled()
        if not keeps or features_BD.dtype != weight_LD.dtype:
            return F.linear(features_BD, weight_LD, bias_L)
        local_BL: Tensor = _Linear.apply(features_BD, weight_LD, bias_L, self.memory)  # type: ignore[no-untyped-call]
        return local_BL

    def extra_repr(self) -> str:
        """For print()."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"here={self.shard.first}:{self.shard.stop}"
        )
