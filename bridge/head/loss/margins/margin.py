"""Interfaces of margins, and the data of a batch that they get.

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
    """Result of a margin for the targets of B samples: tensors [B] of the dtype of their cosines, on their device."""

    logits_B: Tensor
    """Logits z, in place of scale · cos θ."""
    by_cos_B: Tensor
    """Derivatives ∂z/∂cos θ."""
    by_norm_B: Tensor | None = None
    """Derivatives ∂z/∂|x|, for a margin that trains the length of the features; None: 0."""
    penalty_B: Tensor | None = None
    """Added to the loss of each sample; None: nothing."""
    penalty_by_norm_B: Tensor | None = None
    """Derivative of the penalty by |x|; None: 0."""


class Margin(Protocol):
    """Interface of a head's margin; ``None`` in its place means a plain linear classifier: logits = x·wᵀ, without
    normalisation.

    With a margin the logits of a sample x of class y are scale · cos θ_j, except its own class's, z. The loss is
    −log softmax(z), and its gradient by cos θ_y is (p_y − 1) · ∂z/∂cos θ_y: hence a margin returns z and its
    derivative. Your own is a frozen dataclass with these two, for instance CosFace with a margin for each class:

        @dataclass(frozen=True)
        class PerClass:
            margins: tuple[float, ...]
            scale: float = 64.0

            def target(self, cos_B, norms_B, labels_B):
                margin_B = torch.tensor(self.margins, device=cos_B.device, dtype=cos_B.dtype)[labels_B]
                return self.scale * (cos_B - margin_B), torch.full_like(cos_B, self.scale)

    It works wherever the rows are, since it is applied beside the features. Ranks compare margins by their repr, which
    contains the settings of a dataclass. A margin that depends on the step or on earlier batches also has ``for_batch``
    (:class:`AdaptiveMargin`), one that changes the logits of other classes ``negatives`` (:class:`NegativesMargin`).
    """

    @property
    def scale(self) -> float | None:
        """Factor of every logit; finite and > 0. If it is None in a dataclass, a head sets it to
        :func:`~.scale.automatic_scale`."""

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
    """Margin that changes the logits of the other classes, too. Not with ``rows="hosted"``, where shards compute them.

    Products are computed by tensor operations: slower on a CPU than in compiled code, and never in float16.
    """

    def negatives(self, cos_NB: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits [N, B] of N classes for B samples and their derivatives by ``cos_NB``, in its dtype.

        A class with the logit −∞ is left out of that sample's sum. The results at a sample's own class are ignored.
        Data about the samples that the margin keeps from ``for_batch`` count as constant.
        """


class AdaptiveMargin(Protocol):
    """Margin that depends on the step, the batch, or earlier batches: another one in each forward pass.

        @dataclass(frozen=True)
        class Growing:
            scale: float = 64.0

            def for_batch(self, batch):
                return gt.CosFace(self.scale, 0.35 * min(1.0, batch.step / 1000))

    It is a frozen dataclass, too. ``changes_negatives = True`` in the class says that the result is a
    :class:`NegativesMargin`.
    """

    @property
    def scale(self) -> float | None:
        """Largest scale of the margins of all batches; None as in :class:`Margin`."""

    def for_batch(self, batch: MarginBatch) -> Margin:
        """Return the margin of the forward pass over this batch. Collective."""


AnyMargin = Margin | AdaptiveMargin


@dataclass(frozen=True, kw_only=True, eq=False)
class MarginBatch:
    """Data of a batch for a margin, before the rows are used. Tensors are on the features' device.

    With ranks the *joint batch* is that of all of them. Where rows are on the ranks ``norms_B`` and ``labels_B`` are
    those of the joint batch, else this rank's.
    """

    step: int
    """Number of row updates so far (``head.step``): the same for all micro-batches of an update."""
    training: bool
    """Whether the head is in ``train()``."""
    norms_B: Tensor
    """Lengths |x|, in the type in which the loss is computed."""
    labels_B: Tensor
    """Ids of the classes, int64."""
    first_sample: int
    """Place of the first sample in the joint batch."""
    joint_size: int
    """Number of samples of the joint batch."""
    target_cos: Callable[[], Tensor]
    """Function that returns cos θ [B] between each feature and the row of its class. Costs a pull of those rows, on
    ranks an all-reduce of 4·B bytes; collective."""
    joint_sum: Callable[[Tensor], Tensor]
    """Sum over the ranks."""
    known: dict[str, Tensor]
    learned: dict[str, Tensor] = field(default_factory=dict)
    """Numbers learned by :meth:`learn`."""
    counts_B: Tensor | None = None
    """Counts 1 or 0 of samples with labels on a device, of which some are ignored; None: all count."""

    def joint_mean(self, values_KB: Tensor) -> Tensor:
        """Return means [K] of K numbers of each sample over the joint batch, float64; 0 if that is empty.

        With ranks and rows in a cluster one all-reduce of 8·K bytes, in which every rank takes part: only in training.
        """
        values_KB = values_KB.double()
        if self.counts_B is None:
            return self.joint_sum(values_KB.sum(-1)) / max(1, self.joint_size)
        return self.joint_sum(values_KB.where(self.counts_B == 1, 0.0).sum(-1)) / self.num_counted

    @property
    def num_counted(self) -> int | Tensor:
        """Number of samples of the joint batch that count; a tensor of at least 1 where only a device knows them."""
        if self.counts_B is None:
            return self.joint_size
        return self.joint_sum((self.counts_B == 1).sum().double()).clamp(min=1)

    def recall(self, name: str, initial: float = 0.0) -> Tensor:
        """Return the number learned under this name (0-dim, float64), or ``initial``."""
        found = self.known.get(name)
        device = self.norms_B.device
        return torch.tensor(initial, dtype=torch.float64, device=device) if found is None else found.to(device)

    def learn(self, **values: Tensor) -> None:
        """Keep numbers (0-dim, float64) by name for later batches, in ``state_dict`` and snapshots.

        The earlier ones stay outside training, for a joint batch that is empty or has a bad label, and if a number is
        not finite.
        """
        if not self.training or self.joint_size == 0:
            return
        sound = torch.isfinite(torch.stack(list(values.values()))).all()
        if self.counts_B is not None:
            sound = sound & (self.counts_B.sum() > 0)  # NaN is not
        for name, value in values.items():
            self.learned[name] = torch.where(sound, value, self.recall(name))


def changes_negatives(margin: Any) -> bool:
    """Return whether the logits of other classes depend on the margin."""
    return bool(getattr(margin, "changes_negatives", hasattr(margin, "negatives")))
