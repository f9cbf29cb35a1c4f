"""What a margin is, and what it is told of a batch.

Shapes: B samples, N rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

NORM_FLOOR = 1e-12
"""Lengths below this count as this, as in ``torch.nn.functional.normalize``."""


class TargetLogits(NamedTuple):
    """What a margin makes of the targets of B samples: tensors [B] of the dtype of their cosines, on their device."""

    logits_B: Tensor
    """z, that take the place of scale · cos θ."""
    by_cos_B: Tensor
    """∂z/∂cos θ."""
    by_norm_B: Tensor | None = None
    """∂z/∂|x|, for a margin that trains the length of the features; None: 0."""
    penalty_B: Tensor | None = None
    """Added to the loss of each sample; None: nothing."""
    penalty_by_norm_B: Tensor | None = None
    """Its derivative with respect to |x|; None: 0."""


class Margin(Protocol):
    """What a head asks of its margin; ``None`` in its place means a plain linear classifier: logits = x·wᵀ, nothing
    normalised.

    With a margin the logits of a sample x of class y are scale · cos θ_j, but that of its own class, z. The loss is
    −log softmax(z), and its gradient by cos θ_y is (p_y − 1) · ∂z/∂cos θ_y: hence a margin gives z and its derivative.
    One of your own is a frozen dataclass with these two, for instance CosFace with a margin for each class:

        @dataclass(frozen=True)
        class PerClass:
            margins: tuple[float, ...]
            scale: float = 64.0

            def target(self, cos_B, norms_B, labels_B):
                margin_B = torch.tensor(self.margins, device=cos_B.device, dtype=cos_B.dtype)[labels_B]
                return self.scale * (cos_B - margin_B), torch.full_like(cos_B, self.scale)

    It works wherever the rows are, for it is applied beside the features. Ranks compare margins by their repr, which
    names the settings of a dataclass. One that depends on the step or on earlier batches has ``for_batch`` beside
    (:class:`AdaptiveMargin`), one that changes the logits of other classes ``negatives``
    (:class:`NegativesMargin`).
    """

    @property
    def scale(self) -> float | None:
        """Multiplies every logit; finite and > 0. None, of a dataclass: :func:`~.scale.automatic_scale`, once a head
        has it."""

    def target(
        self, cos_B: Tensor, norms_B: Tensor, labels_B: Tensor
    ) -> TargetLogits | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
        """Return the target logits and their derivatives, as :class:`TargetLogits` or the first two or three of its
        fields; all [B], in the dtype of ``cos_B``, on its device.

        Args:
            cos_B: cos θ of each sample and the row of its class; rounding may carry it beyond ± 1.
            norms_B: |x|, the lengths of the features before they are normalised, in the same dtype; at least 1e-12.
            labels_B: int64, ids of the classes.
        """


class NegativesMargin(Margin, Protocol):
    """A margin that changes the logits of the other classes, too. Not with ``rows="hosted"``, where shards make them.

    Products are those of tensor operations, on a CPU slower than the compiled ones, and never in float16.
    """

    def negatives(self, cos_NB: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits [N, B] of N classes for B samples and their derivatives by ``cos_NB``, in its dtype.

        A class with the logit −∞ takes no part in that sample's sum. What is returned at a sample's own class is not
        looked at. What the margin knows of the samples it keeps from ``for_batch``; that counts as constant.
        """


class AdaptiveMargin(Protocol):
    """A margin that is another one in each forward pass: by the step, by the batch, or by what batches before told.

        @dataclass(frozen=True)
        class Growing:
            scale: float = 64.0

            def for_batch(self, batch):
                return gt.CosFace(self.scale, 0.35 * min(1.0, batch.step / 1000))

    A frozen dataclass, too. ``changes_negatives = True`` in the class says that what it returns is a
    :class:`NegativesMargin`.
    """

    @property
    def scale(self) -> float | None:
        """See :class:`Margin`; the largest that it takes."""

    def for_batch(self, batch: MarginBatch) -> Margin:
        """The margin of the forward pass over this batch. With ranks every rank is asked."""


AnyMargin = Margin | AdaptiveMargin


@dataclass(frozen=True, kw_only=True, eq=False)
class MarginBatch:
    """What a margin is told of a batch before the rows are worked on. Tensors are on the features' device.

    With ranks the *joint batch* is that of all of them. Where rows are on the ranks ``norms_B`` and ``labels_B`` are
    those of the joint batch, else this rank's.
    """

    step: int
    """Row updates so far (``head.step``): the same for all micro-batches of an update."""
    training: bool
    """Whether the head is in ``train()``."""
    norms_B: Tensor
    """|x|, in the type in which the loss is computed."""
    labels_B: Tensor
    """int64, ids of the classes."""
    first_sample: int
    """Place of the first of the samples in the joint batch."""
    joint_size: int
    """Samples of the joint batch."""
    target_cos: Callable[[], Tensor]
    """cos θ [B] between each feature and the row of its class. Costs a pull of those rows, on ranks an all-reduce of
    4·B bytes; every rank asks, or none."""
    joint_sum: Callable[[Tensor], Tensor]
    """The sum over the ranks."""
    known: dict[str, Tensor]
    learned: dict[str, Tensor] = field(default_factory=dict)
    """See :meth:`learn`."""
    counts_B: Tensor | None = None
    """1 where a sample counts, of labels on a device, among which are ignored ones; None: all do."""

    def joint_mean(self, values_KB: Tensor) -> Tensor:
        """Means [K] of K numbers of each sample over the joint batch, float64; 0 if that is empty.

        With ranks and rows in a cluster one all-reduce of 8·K bytes, in which every rank takes part: only in training.
        """
        values_KB = values_KB.double()
        if self.counts_B is None:
            return self.joint_sum(values_KB.sum(-1)) / max(1, self.joint_size)
        return self.joint_sum(values_KB.where(self.counts_B == 1, 0.0).sum(-1)) / self.num_counted

    @property
    def num_counted(self) -> int | Tensor:
        """Samples of the joint batch that count; a tensor of at least 1 where a device alone knows them."""
        if self.counts_B is None:
            return self.joint_size
        return self.joint_sum((self.counts_B == 1).sum().double()).clamp(min=1)

    def recall(self, name: str, initial: float = 0.0) -> Tensor:
        """What was learned under this name (0-dim, float64), or ``initial``."""
        found = self.known.get(name)
        device = self.norms_B.device
        return torch.tensor(initial, dtype=torch.float64, device=device) if found is None else found.to(device)

    def learn(self, **values: Tensor) -> None:
        """Keep numbers (0-dim, float64) under their names for the batches to come, in ``state_dict`` and snapshots.

        Only in training, not of an empty joint batch or one with a bad label, and only if all of them are finite: else
        the ones before stay.
        """
        if not self.training or self.joint_size == 0:
            return
        sound = torch.isfinite(torch.stack(list(values.values()))).all()
        if self.counts_B is not None:
            sound = sound & (self.counts_B.sum() > 0)  # NaN is not
        for name, value in values.items():
            self.learned[name] = torch.where(sound, value, self.recall(name))


def changes_negatives(margin: Any) -> bool:
    """Whether the logits of other classes depend on it."""
    return bool(getattr(margin, "changes_negatives", hasattr(margin, "negatives")))
