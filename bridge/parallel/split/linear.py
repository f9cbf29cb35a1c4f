"""``nn.Linear`` split by output features.

Per training step: one exchange of six integers between the hosts, an all-gather of B·D numbers (in the type that
autocast computes in), and a reduce-scatter of B·D in the backward pass; the loss adds another exchange and the
collectives listed in ``bridge/collectives/cross_entropy.py``.
Time O(B·D·C / R). Memory: C·D / R parameters, B·D features, B·C / R logits once.

Legend: B samples of all ranks, S of this one, C output features, L of them here, D input features, R ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from geartrain.bridge.parallel.mesh import MeshGroup
from geartrain.bridge.parallel.split.agreement import StepAgreement
from geartrain.bridge.parallel.split.layer import SplitLayer, autocast_dtype, check_floating
from geartrain.bridge.parallel.split.logits import SplitLogits
from geartrain.bridge.parallel.split.travel import all_samples


class FeatureSink(Protocol):
    """Receives the features of a micro-batch in place of the layer, which then works on those of all together."""

    def arrive(self, features_SD: Tensor) -> Any:
        """Return the layer's output for them: a placeholder for their logits."""


class SplitLinear(SplitLayer):
    """An ``nn.Linear`` with output features spread over ranks; returns :class:`SplitLogits`.

    Attributes: ``weight`` [C, D] and ``bias`` [C] or None, as in :class:`SplitLayer`; ``in_features``,
    ``out_features``.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        name: str,
        linear: nn.Linear,
        rows: Mapping[str, Tensor | None],
        group: MeshGroup,
        agreement: StepAgreement,
    ) -> None:
        super().__init__(name, linear, rows, group, agreement)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.sink: FeatureSink | None = None
        """Receiver of features during a step of micro-batches."""

    def forward(self, features_SD: Tensor) -> Any:
        """Return the logits (:class:`SplitLogits`) of features [S, D].

        Raises InvalidRows for features that do not fit, SyncError if another rank's do not, SpecMismatch where ranks
        differ.
        """
        if self.sink is not None:
            return self.sink.arrive(features_SD)
        link = self.shard.group.link

        sizes = self.agreement.sizes(self.layer_name, features_SD, lambda: self.check(features_SD))
        own_SD = self.travelling(features_SD)
        features_BD = all_samples(own_SD, link.start_gather(own_SD, sizes), link, sizes)
        weight_LD = self.local("weight")
        assert weight_LD is not None
        logits = self.logits(F.linear(features_BD, weight_LD, self.local("bias")), sizes)
        self.agreement.collectives_end()
        return logits

    def check(self, features_SD: Tensor) -> None:
        """Raise InvalidRows for features that do not fit."""
        check_floating(features_SD, self.in_features, self.layer_name)

    def travelling(self, features_SD: Tensor) -> Tensor:
        """Return the features in the type in which they are sent: that of autocast, if it is on and narrower."""
        dtype = autocast_dtype(features_SD.device)
        return features_SD if dtype is None or features_SD.dtype.itemsize > 4 else features_SD.to(dtype)

    def logits(self, local_BL: Tensor, sizes: list[int]) -> SplitLogits:
        """Return the layer's output, from its own classes' logits of the samples of all ranks."""
        return SplitLogits(local_BL, sizes, self.shard, self.agreement)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"here={self.shard.first}:{self.shard.stop}"
        )
