"""``nn.Linear`` split by output features.

Per training step: one exchange of six integers between the hosts, an all-gather of B·D numbers (in the type that
autocast computes in), and a reduce-scatter of B·D in the backward pass; the loss adds what ``cross_entropy.py`` says.
Time O(B·D·C / R). Memory: C·D / R parameters, B·D features, B·C / R logits once.

Legend: B samples of all ranks, S of this one, C output features, L of them here, D input features, R ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from geartrain.bridge.collectives.pending import Pending
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


class ArrivingFeatures:
    """Features of all ranks on their way; :meth:`SplitLinear.take` makes logits of them."""

    def __init__(self, own_SD: Tensor, pending: Pending[Tensor], sizes: list[int]) -> None:
        self.own_SD = own_SD
        self.pending = pending
        self.sizes = sizes


class _Linear(torch.autograd.Function):
    """``F.linear``; logits and the gradient by the weight lie in memory that is used again."""

    @staticmethod
    def forward(
        ctx: Any, features_BD: Tensor, weight_LD: Tensor, bias_L: Tensor | None, memory: LinearMemory
    ) -> Tensor:
        ctx.save_for_backward(features_BD, weight_LD)
        ctx.memory = memory
        local_BL = memory.logits.empty((len(features_BD), len(weight_LD)), weight_LD)
        if bias_L is None:
            return torch.mm(features_BD, weight_LD.t(), out=local_BL)
        return torch.addmm(bias_L, features_BD, weight_LD.t(), out=local_BL)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BL: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        features_BD, weight_LD = ctx.saved_tensors
        of_features, of_weight, of_bias, _ = ctx.needs_input_grad
        by_features_BD = by_weight_LD = None
        if of_features:
            by_features_BD = gradient_BL @ weight_LD
        if of_weight:
            by_weight_LD = ctx.memory.gradient.empty(weight_LD.shape, weight_LD)
            torch.mm(gradient_BL.t(), features_BD, out=by_weight_LD)
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
        self._memory = LinearMemory(KeptMemory(), KeptMemory())

    def begin(self, features_SD: Tensor) -> ArrivingFeatures:
        """Begin to gather the features of all ranks; every rank does, then takes.

        Raises InvalidRows for features that do not fit, SyncError where they do not on another rank, SpecMismatch
        where ranks differ.
        """
        link = self.shard.group.link

        def check() -> None:
            check_floating(features_SD, self.in_features, self.layer_name)
            self.agreement.check_labels(len(features_SD), self.out_features)

        sizes = self.agreement.sizes(self.layer_name, features_SD, check)
        dtype = autocast_dtype(features_SD.device)
        own_SD = features_SD if dtype is None or features_SD.dtype.itemsize > 4 else features_SD.to(dtype)
        return ArrivingFeatures(own_SD, link.start_gather(own_SD, sizes), sizes)

    def take(self, arriving: ArrivingFeatures) -> SplitLogits:
        """The logits of what :meth:`begin` began."""
        features_BD = all_samples(arriving.own_SD, arriving.pending, self.shard.group.link, arriving.sizes)
        weight_LD = self.local("weight")
        assert weight_LD is not None
        local_BL = self._logits(features_BD, weight_LD, self.local("bias"))
        return SplitLogits(local_BL, arriving.sizes, self.shard, self.agreement)

    def forward(self, features_SD: Tensor) -> SplitLogits:
        """Logits of features [S, D]; raises what :meth:`begin` does."""
        return self.take(self.begin(features_SD))

    def _logits(self, features_BD: Tensor, weight_LD: Tensor, bias_L: Tensor | None) -> Tensor:
        device = features_BD.device
        keeps = device.type in ("cpu", "meta") and autocast_dtype(device) is None and torch.is_grad_enabled()
        if not keeps or features_BD.dtype != weight_LD.dtype:
            return F.linear(features_BD, weight_LD, bias_L)
        local_BL: Tensor = _Linear.apply(features_BD, weight_LD, bias_L, self._memory)  # type: ignore[no-untyped-call]
        return local_BL

    def extra_repr(self) -> str:
        """For print()."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"here={self.shard.first}:{self.shard.stop}"
        )
