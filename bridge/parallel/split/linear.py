"""``nn.Linear`` split by output features.

Per training step: one exchange of six integers between the hosts, an all-gather of B·D numbers (in the type that
autocast computes in), and a reduce-scatter of B·D in the backward pass; the loss adds what ``cross_entropy.py`` says.
Time O(B·D·C / R). Memory: C·D / R parameters, B·D features, B·C / R logits once.

Legend: B samples of all ranks, S of this one, C output features, L of them here, D input features, R ranks.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from geartrain.bridge.collectives.pending import Pending
from geartrain.bridge.parallel.mesh import MeshGroup
from geartrain.bridge.parallel.split.agreement import StepAgreement
from geartrain.bridge.parallel.split.layer import SplitLayer, autocast_dtype, check_floating
from geartrain.bridge.parallel.split.logits import SplitLogits
from geartrain.bridge.parallel.split.travel import all_samples


class ArrivingFeatures:
    """Features of all ranks on their way; :meth:`SplitLinear.take` makes logits of them."""

    def __init__(self, own_SD: Tensor, pending: Pending[Tensor], sizes: list[int]) -> None:
        self.own_SD = own_SD
        self.pending = pending
        self.sizes = sizes


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
        local_BL = F.linear(features_BD, weight_LD, self.local("bias"))
        return SplitLogits(local_BL, arriving.sizes, self.shard, self.agreement)

    def forward(self, features_SD: Tensor) -> SplitLogits:
        """Logits of features [S, D]; raises what :meth:`begin` does."""
        return self.take(self.begin(features_SD))

    def extra_repr(self) -> str:
        """For print()."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"here={self.shard.first}:{self.shard.stop}"
        )
