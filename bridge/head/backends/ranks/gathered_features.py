"""Features that reach rows on ranks part by part: each part is gathered while the next one is computed.

The traffic is that of a step with the whole batch, in as many pieces as there are parts, plus a number a part by which
the ranks learn that one of them failed. Rows are read once for all parts, so selections and margins see the whole
batch. The feature gradients are sent in the backward pass: those of a part while the backbone computes with the one
before.

Legend: R ranks, P parts, B samples of all ranks, S of one part of this rank, D width.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.specs import Ids
from geartrain.bridge.collectives.part_exchange import GatheredParts, PartSizes, SummedParts
from geartrain.bridge.head.backends.ranks.passes import RankRows
from geartrain.bridge.head.backends.ranks.update import RankStep, RankStepFacts
from geartrain.bridge.head.loss.checks import check_finite
from geartrain.bridge.head.loss.feature_parts import FeatureParts
from geartrain.bridge.head.loss.sample_weights import CountedSamples
from geartrain.bridge.head.loss.softmax import OnlineSoftmax, own_gradient


class PartedRows(RankRows):
    """Rows of a forward pass over a batch that came in parts; its feature gradients are summed part by part."""

    def __init__(self, sizes: PartSizes, *arguments: Any, overlap: bool, fuses: bool) -> None:
        """``arguments`` are those of :class:`RankRows`; without ``overlap`` gradients are sent in the forward pass."""
        super().__init__(*arguments, fuses=fuses)
        self.sizes, self.overlap = sizes, overlap
        self._part_BD: Tensor | None = None
        self._summed: SummedParts | None = None
        self._taken: dict[int, Tensor] = {}

    def _finish(self, softmax: OnlineSoftmax) -> tuple[Tensor, Tensor | None]:
        losses_S, part_BD = softmax.finish_part()
        if part_BD is not None:
            # One of several sums is a view, which would keep the memory of all until the backward pass.
            self._part_BD = part_BD if len(softmax.parts) == 1 else part_BD.clone()
            if not self.overlap:
                self.start()
        return losses_S, None

    def start(self) -> None:
        """Start to send the feature gradients; every rank does so in its backward pass, once."""
        if self._summed is None:
            assert self._part_BD is not None
            order = reversed(range(self.sizes.num_parts))
            self._summed = SummedParts(self._table.link, self.sizes, self._part_BD, order, overlap=self.overlap)
            self._part_BD = None

    def collect(self, part: int) -> Tensor:
        """Return gradients of single losses by the features of a part [S, D or more]; call it for the last part
        first."""
        if part not in self._taken:
            assert self._summed is not None
            own = self.sizes.own(part)
            self._taken[part] = own_gradient(self.batch, self._summed.collect(part), own)
            if self.batch.counts_B is not None:
                self._taken[part].masked_fill_((self.batch.counts_B[own] != 1).unsqueeze(1), 0.0)
        return self._taken[part]


def rows_of_parts(
    step: RankStep, parts: FeatureParts, labels: Tensor, weight: Tensor | None
) -> tuple[CountedSamples, RankStepFacts, PartedRows]:
    """Compute the parts, gather them, and return the pass over the rows; collective, with equally many parts.

    If any rank cannot continue, every rank raises: the error of computing a part on the rank where it occurred,
    SyncError on the others, and otherwise what :meth:`RankStep.agree` raises.
    """
    link = step.backend.table.link
    features: Tensor | None = None
    samples: CountedSamples | None = None
    failure: Exception | None = None
    mine = [0] * len(parts.sizes)
    try:
        features = parts.compute(0)
        step.check_placed(features)
        config, like = step.backend.settings.config, features.detach()
        samples = (
            CountedSamples.on_device(like[:0], labels, weight, config, num=parts.size)
            if step.checks_late(labels)
            else CountedSamples.of_labels(labels, weight, config, step.backend.live_classes, num=parts.size, like=like)
        )
        kept = [parts.kept(part, samples.places) for part in range(len(parts.sizes))]
        mine = [size if some is None else len(some) for size, some in zip(parts.sizes, kept, strict=True)]
        features = parts.join(0, features, kept[0])
        check_finite(features.detach())
    except Exception as exc:  # of any kind: the others wait for this rank
        failure = exc
    samples, agreed = step.agree_on(features, samples, failure, mine)
    assert features is not None
    labels_on_their_way = step.start_labels(samples, agreed)
    sizes = PartSizes(agreed.part_sizes, link.rank)
    joint_features_BD = _gathered(step, parts, features, samples.places, sizes)
    labels_B = labels_on_their_way.result()

    # Where it is unknown whether every rank will go backward, the gradients are sent at once.
    overlap = parts.overlap and step.training and agreed.all_want_gradient
    rows = step.rows_over(joint_features_BD, labels_B, agreed, partial(PartedRows, sizes, overlap=overlap))
    parts.gradients = rows
    return samples, agreed, rows


def _gathered(step: RankStep, parts: FeatureParts, first_SD: Tensor, places: Ids | None, sizes: PartSizes) -> Tensor:
    """Return the features of all ranks [B, D], given those of this rank's first part.

    A rank that fails continues with zeros until the others know, which is when they have started the part behind.
    """
    link = step.backend.table.link
    gathered = GatheredParts(link, sizes, overlap=parts.overlap)
    gathered.start(0, step.travelling(first_SD))
    failure: Exception | None = None
    for part in range(1, sizes.num_parts):
        features_SD: Tensor | None = None
        try:
            features_SD = _computed(parts, part, places, first_SD) if failure is None else None
        except Exception as exc:  # of any kind: the others wait for this rank
            failure = exc
        if features_SD is None:
            features_SD = first_SD.new_zeros(sizes.of(part)[link.rank], first_SD.shape[1])
        gathered.start_or_fail(part, step.travelling(features_SD), failure)
    return gathered.whole(failure)


def _computed(parts: FeatureParts, part: int, places: Ids | None, first_SD: Tensor) -> Tensor:
    features = parts.compute(part)
    mine, first = (
        f"{of_part.dtype}, width {list(of_part.shape[1:])}, on {of_part.device}" for of_part in (features, first_SD)
    )
    if mine != first:
        raise InvalidArgument(
            f"the backbone's features are {mine} in micro-batch {part}, and {first} in the first; they must be alike"
        )
    features_SD = parts.join(part, features, parts.kept(part, places))
    check_finite(features_SD.detach())
    return features_SD
