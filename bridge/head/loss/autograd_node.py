"""The autograd node between a head's rows and the network in front of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from geartrain.ams.values.errors import InvalidArgument
from geartrain.bridge.collectives.communicator import Communicator
from geartrain.bridge.collectives.mean import mean_of_ranks
from geartrain.bridge.head.loss.batch import Batch
from geartrain.bridge.head.loss.config import Reduction
from geartrain.bridge.head.loss.sample_weights import CountedSamples
from geartrain.bridge.head.loss.statistics import StepStatistics
from geartrain.bridge.rows.pending import PendingUpdate, PulledVersion


class RowsPass(Protocol):
    """Interface to the rows of one forward pass, wherever they are."""

    @property
    def batch(self) -> Batch:
        """Batch of the pass; after :meth:`forward` it holds the results."""

    def forward(self, *, want_gradient: bool, keep_bytes: int) -> tuple[Tensor, Tensor | None]:
        """Return losses [S] and the gradient of each by its features [S, D]; up to ``keep_bytes`` of logits may be
        kept."""

    def gradient(self, upstream: Tensor) -> tuple[Any, Tensor]:
        """Return the row gradients, and a number that is finite only if all of them are.

        ``upstream`` is the derivative by the mean loss (0-dim), that of all ranks where they train together, or by the
        loss of each sample of this rank [S].
        """

    def discard(self) -> None:
        """Release all memory when no row gradient is needed."""


@dataclass(eq=False)
class HeadCall:
    """One forward pass of a head."""

    rows: RowsPass
    update: PendingUpdate[Any]
    samples: CountedSamples
    keep_bytes: int
    want_rows: bool
    """Whether a backward pass queues row gradients."""
    link: Communicator | None = None
    """Ranks that train together; None: this process alone."""
    share: float | Tensor | None = None
    """Share of this rank's loss in that of all ranks; None: it is that of all, or there is no joint loss."""
    num_ranks: int = 1
    """Number of ranks whose samples the batch holds."""
    takes_mean: bool = True
    """Whether the loss is the plain mean of the batch, so that rows take the derivative by the mean on ranks that have
    one; else rows take those by single samples, as on a rank that has no mean."""
    used: bool = False
    rows_version: PulledVersion = field(init=False)
    statistics: StepStatistics = field(init=False)
    """Statistics, set by :meth:`run`."""

    divisor: float | Tensor = field(init=False)
    """Divisor of the mean: the samples that count, or 1."""
    rank_divisor: float | Tensor = field(init=False)
    """Divisor of its derivative, for derivatives by single samples: the average count of a rank, because DDP and FSDP2
    average the gradients of the ranks' features."""

    def __post_init__(self) -> None:
        """Record the classes and rows of the pass."""
        batch = self.rows.batch
        if self.samples.reduces and not self.takes_mean:  # another rank's samples have weights
            own_S = None if batch.counts_B is None else batch.counts_B[batch.own]
            own = max(1, len(self.samples.labels_S)) if own_S is None else own_S.nansum().clamp(min=1)
            self.divisor = self.rank_divisor = own
        elif batch.late_divisors is not None:
            self.divisor, self.rank_divisor = batch.late_divisors
        else:
            self.divisor = max(1, batch.size)
            self.rank_divisor = self.divisor / self.num_ranks
        self.rows_version = self.update.rows_version

    def run(self, *, want_gradient: bool) -> tuple[Tensor, Tensor | None]:
        """Return the mean loss (0-dim) or losses [S] and, if wanted, the feature gradients [S, D] of the losses.

        Autocast is off inside: the passes choose their own types.
        """
        with torch.inference_mode(False), torch.no_grad():
            keep_bytes = self.keep_bytes if self.want_rows else 0
            losses_S, gradient_SD = self.rows.forward(want_gradient=want_gradient, keep_bytes=keep_bytes)
            batch = self.rows.batch
            of_mean = batch.losses_B if self.takes_mean else losses_S
            loss = of_mean.sum() / self.divisor if self.samples.reduces else losses_S
        self.statistics = StepStatistics(
            losses=losses_S.detach(),
            targets=batch.target_B,
            highest_others=batch.highest_B,
            num_active=batch.num_active,
            counts=None if batch.counts_B is None else batch.counts_B[batch.own],
        )
        if not self.want_rows:
            self.rows.discard()
        return loss, gradient_SD

    def upstream_of_samples(self, upstream: Tensor) -> Tensor:
        """Return derivatives by the losses of single samples [S] from those by the result of :meth:`run`."""
        return (upstream / self.rank_divisor).expand(len(self.samples.labels_S)) if upstream.ndim == 0 else upstream

    def reduced(self, losses: Tensor, batch: int, reduction: Reduction) -> Tensor:
        """Return the loss (0-dim) over the samples of all ranks, or the losses [B], from the result of :meth:`run`."""
        loss = self.samples.reduced(losses, batch, reduction)
        if self.share is None or self.link is None:
            return loss
        return mean_of_ranks(loss * self.share, None, self.link).to(loss.dtype)

    def defer(self, upstream: Tensor) -> Tensor | None:
        """Queue the row gradients for when autograd accumulates; return the stand-in's gradient."""
        return self.update.defer(self, upstream.detach()) if self.want_rows else None

    def queue_row_gradients(self, upstream: Tensor, update: PendingUpdate[Any]) -> None:
        """Make the row gradients and add them to the head's ``update``."""
        if self.used:
            raise InvalidArgument(
                "backward ran a second time over the loss of a ClassHead, whose pulled rows now hold their gradient; "
                "call the head again for another loss (retain_graph does not help)"
            )
        if self.rows_version != self.update.rows_version:
            raise InvalidArgument(
                "classes were added, retired or loaded, or the table was restored, between this forward pass and its "
                "backward; call the head again"
            )
        self.used = True
        if not (self.takes_mean and self.samples.reduces):
            upstream = self.upstream_of_samples(upstream)
            upstream = upstream / self.num_ranks if self.num_ranks > 1 else upstream
        with torch.autocast(upstream.device.type, enabled=False), torch.no_grad():
            gradient, checksum = self.rows.gradient(upstream)
        # Ranks have equal weight in the push: micro-batches of a step may be divided among them in different ways.
        update.add(gradient, checksum, 1)


def refuse_second_derivative() -> None:
    """Raise InvalidArgument in a backward pass under ``create_graph=True``: the gradient would count as a constant."""
    if torch.is_grad_enabled():
        raise InvalidArgument(
            "a ClassHead has no second derivatives: create_graph=True cannot go through its loss; take the "
            "gradient of the loss without it, or compute a gradient penalty on another loss"
        )


class HeadLoss(torch.autograd.Function):
    """Autograd function loss(features [S, D]); backward gives exact feature gradients and queues the row gradients."""

    @staticmethod
    def forward(ctx: Any, features_SD: Tensor, stand_in: Tensor | None, call: HeadCall) -> Tensor:
        """Run the pass; where autograd reaches ``stand_in``, row gradients count."""
        del stand_in
        want_gradient = bool(ctx.needs_input_grad[0])
        with torch.autocast(features_SD.device.type, enabled=False):
            loss, gradient_SD = call.run(want_gradient=want_gradient)
        ctx.call = call
        ctx.feature_dtype = features_SD.dtype
        width = features_SD.shape[1]  # rows with biases have one more column
        ctx.save_for_backward(*([gradient_SD[:, :width]] if gradient_SD is not None else []))
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """Scale the feature gradient of the forward pass."""
        refuse_second_derivative()
        # read once: under checkpoint() reading recomputes them
        of_stand_in, saved = ctx.call.defer(upstream), ctx.saved_tensors
        with torch.autocast(upstream.device.type, enabled=False):
            if not saved:
                return None, of_stand_in, None
            each = upstream / ctx.call.rank_divisor if upstream.ndim == 0 else upstream.unsqueeze(1)
            return (saved[0] * each).to(ctx.feature_dtype), of_stand_in, None


def head_loss(features_BD: Tensor, stand_in: Tensor | None, call: HeadCall, reduction: Reduction) -> Tensor:
    """Return the loss (0-dim), or losses [B], of one call, joined to the graph of the features, and to ``stand_in`` of
    trained rows."""
    counted = call.samples.counted
    features_SD = features_BD if counted is None else features_BD[counted]
    losses: Tensor = HeadLoss.apply(features_SD, stand_in, call)  # type: ignore[no-untyped-call]
    return call.reduced(losses, len(features_BD), reduction)
