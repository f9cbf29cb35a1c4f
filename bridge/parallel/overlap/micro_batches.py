"""A training step over micro-batches, whose features and gradients travel between ranks while the backbone computes.

A call runs the whole batch forward, which hides most communication. :meth:`MicroBatches.backward` goes forward and
backward in each micro-batch, which needs the least memory.

The schedule is that of hybrid parallel pipelining (Song et al., "Large-Scale Training System for 100-Million
Classification at Alibaba", section 3.3.1), with the head in one piece: its rows are read once for all micro-batches.

    backbone   1   2   3   4               backward 4   3   2   1
    features     ┄┄1 ┄┄2 ┄┄3 ┄┄4 gathered
    head                          1 to 4
    gradients                             ┄┄4 ┄┄3 ┄┄2 ┄┄1 summed, and DDP's buckets beside the backward pass of 1

Legend: B samples of this rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from geartrain.ams.values.arguments import boolean, integer
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.text import quoted
from geartrain.bridge.head.backends.backend import RowBackend
from geartrain.bridge.head.class_head import ClassHead
from geartrain.bridge.head.loss.feature_parts import FeatureParts
from geartrain.bridge.parallel.overlap.inputs import micro_batch, sizes_of_parts
from geartrain.bridge.rows.optimizer import RowOptimizer


class TakesParts(Protocol):
    """Head that accepts features part by part, such as :class:`~geartrain.ClassHead`."""

    takes_parts: bool
    """Whether it does so at present; else it is called with the features of the whole batch."""
    backend: RowBackend

    def loss_of_parts(self, parts: FeatureParts, labels: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return the loss, as a call with the features of all parts."""


class MicroBatches(nn.Module):
    """Backbone and head as one module, ``loss = step(images, labels)``, that divides each batch into micro-batches.

        step = gt.MicroBatches(DistributedDataParallel(backbone), head, num=4)
        optimizer, rows = torch.optim.SGD(backbone.parameters(), lr=0.1), gt.RowOptimizer(head)
        for images, labels in loader:
            optimizer.zero_grad(); rows.zero_grad()
            step(images, labels).backward()
            optimizer.step(); rows.step()

    With ``ClassHead(rows="ranks")`` on several ranks the features of a micro-batch are all-gathered while the backbone
    computes the next one, and the gradients of a micro-batch's features are summed while the backbone's backward pass
    works on the one after it, last first; DDP and FSDP2 reduce once, in the backward pass of the first. At most two of
    these collectives are in flight. Loss, gradients and row updates are those of ``head(backbone(images), labels)``
    to rounding, for every selection, margin and reduction, except for the backbone's own dependence on the batch size:
    batch norm uses the statistics of a micro-batch, dropout draws anew.

    Any other head is called once, with the features of all micro-batches: same result, no overlap.

    Memory: activations of the whole batch, unless the backbone checkpoints them; the features and feature gradients of
    all ranks, 2·4·B·R·D bytes, until the backward pass has ended. :meth:`backward` needs those of one or two
    micro-batches, and hides less. Costs of a step on ranks: those of the head, with
    one all-gather and one reduce-scatter for each micro-batch, and an exchange of one number for each but the first.

    Every rank passes as many micro-batches; batches may be uneven or empty. A rank whose backbone fails in a
    micro-batch raises its error, the others SyncError; a lost rank is RankLost, within the time limit of the process
    group. A backbone with collectives in its forward pass (FSDP2, synchronised batch norm) has only that limit. Not
    thread-safe.
    """

    def __init__(self, backbone: nn.Module, head: nn.Module, num: int, *, overlap: bool = True) -> None:
        """Join backbone and head; every rank does.

        Args:
            backbone: Returns features [B, D] of a batch; may be in DDP or FSDP2, whole or in parts.
            head: Returns the loss of ``head(features, labels)``.
            num: Micro-batches of a batch. More of them hide more, but each has less to compute: 4 to 8.
            overlap: Whether communication overlaps computation; else it is waited for at once, with the same result.

        Raises InvalidArgument, and SpecMismatch on every rank unless all pass equal numbers.
        """
        super().__init__()
        for name, module in (("backbone", backbone), ("head", head)):
            if not isinstance(module, nn.Module):
                raise InvalidArgument(f"{name} is {quoted(module)}; it must be a torch.nn.Module")
        self.backbone = backbone
        self.head = head
        self.num = integer("num", num, 1)
        self.overlap = boolean("overlap", overlap)
        if self._parted is not None:
            backend = self._parted.backend
            assert backend.peers is not None, "parts are for several ranks"
            what = f"the micro-batches in front of table {backend.table.spec.name!r}"
            backend.peers.require_equal({"num": self.num, "overlap": self.overlap}, what)

    @property
    def _parted(self) -> TakesParts | None:
        """The head, if it accepts features in parts; else None."""
        return cast(TakesParts, self.head) if getattr(self.head, "takes_parts", False) else None

    def forward(self, images: Any, labels: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return the loss of a batch, as ``head(backbone(images), labels, weight)``.

        ``images`` is the backbone's input: a tensor [B, …], or a tuple, list or dict of such. ``labels`` [B] int64 and
        ``weight`` [B] are the head's. Raises errors of backbone and head, InvalidArgument, SyncError, RankLost.
        """
        num_samples = len(labels) if isinstance(labels, Tensor) and labels.ndim else 0
        inputs = [micro_batch(images, part, self.num, num_samples) for part in range(self.num)]
        return self._loss(inputs, sizes_of_parts(num_samples, self.num), labels, weight)

    def backward(
        self,
        images: Any,
        labels: Tensor,
        weight: Tensor | None = None,
        *,
        scale: Callable[[Tensor], Tensor] = lambda loss: loss,
        reduces: bool = True,
        rows: RowOptimizer | None = None,
        ended: Callable[[str], object] = lambda phase: None,  # noqa: ARG005
    ) -> Tensor:
        """Go forward and backward in each micro-batch in turn; return the loss of the batch, without a graph.

            optimizer.zero_grad(); rows.zero_grad()
            loss = step.backward(images, labels)             # in the place of step(images, labels).backward()
            optimizer.step(); rows.step()

        Memory: activations, features and logits of one micro-batch, or of two if the head accepts parts: the features
        of the second are in flight meanwhile. Row gradients add up to one push. Loss and gradients are those of the
        whole batch if all classes are active and the margin depends on single samples; with ``PartialFC`` and
        ``KNNSoftmax`` each micro-batch has its own labels, and the same random classes. DDP reduces once, FSDP2 in each
        micro-batch. ``scale`` is applied to the loss before backward: ``scaler.scale`` of a GradScaler. A step of
        several batches divides by their number there, and passes ``reduces=False`` for all but the last, in which DDP
        reduces. ``rows`` steps at the end of the last backward pass, while DDP's gradients travel: in the place of its
        own step, and not with a GradScaler (:meth:`RowOptimizer.step_in_backward`). ``ended`` is called with "forward"
        and "backward" at the end of each, again and again.

        With ranks it costs an exchange and an all-reduce of ``num`` numbers more than :meth:`forward`, and waits for
        labels on a device. If it raises, discard the gradients of earlier micro-batches: ``zero_grad()`` of both
        optimizers. Raises as :meth:`forward`, and InvalidArgument for a head that is no ClassHead or returns the loss
        of each sample.
        """
        head, num_samples = cast(ClassHead, self.head), len(labels) if isinstance(labels, Tensor) and labels.ndim else 0
        if not getattr(head, "adds_up", False):
            raise InvalidArgument(
                "backward() adds up the losses of micro-batches, and the head is no gt.ClassHead with reduction='mean' "
                "or 'sum'; call the module, and backward() of its loss"
            )
        peers = head.backend.peers
        is_alone = peers is None or peers.world_size == 1
        at_once = 2 if self._parted is not None and self.overlap else 1
        sizes = sizes_of_parts(num_samples, self.num)
        groups = [sizes[first : first + at_once] for first in range(0, self.num, at_once)]
        samples = [sum(group) for group in groups]

        def divide() -> tuple[list[Any], Tensor]:
            inputs = [micro_batch(images, part, self.num, num_samples) for part in range(self.num)]
            return inputs, _counted(head, labels, weight, samples)

        inputs, counted = divide() if peers is None else peers.run_together(divide, "no micro-batch was computed")
        counted = counted if peers is None else peers.sum(counted)
        is_sum = head.backend.settings.config.reduction == "sum"
        shares = [1.0] * len(groups) if is_sum else (counted / (counted.sum() or 1.0)).tolist()
        of_labels = torch.split(labels, samples)
        of_weight = [None] * len(groups) if weight is None else torch.split(weight, samples)
        whole = torch.zeros(())
        for number, group in enumerate(groups):
            mine = [inputs.pop(0) for _ in group]
            if is_alone and num_samples and not samples[number]:
                continue
            is_last = reduces and (not any(samples[number + 1 :]) if is_alone else number == len(groups) - 1)
            loss = self._loss(mine, group, of_labels[number], of_weight[number], is_last=is_last)
            loss = loss * shares[number]
            scaled = scale(loss)
            if is_last and rows is not None:
                rows.step_in_backward(scaled)
            ended("forward")
            scaled.backward()  # type: ignore[no-untyped-call]
            ended("backward")
            whole = whole.to(loss) + loss.detach()
        return whole

    def _loss(
        self, inputs: list[Any], sizes: Sequence[int], labels: Tensor, weight: Tensor | None, *, is_last: bool = True
    ) -> Tensor:
        """Return the loss over some micro-batches; DDP reduces in their backward pass if they are the last."""

        def compute(part: int) -> Tensor:
            with _reducing(self.backbone, is_last and part == len(sizes) - 1):
                features: Tensor = self.backbone(inputs[part])
            inputs[part] = None
            return features

        if self._parted is not None:
            parts = FeatureParts(compute, sizes, overlap=self.overlap)
            return self._parted.loss_of_parts(parts, labels, weight)
        features = torch.cat([compute(part) for part in range(len(sizes))])
        loss: Tensor = self.head(features, labels) if weight is None else self.head(features, labels, weight)
        return loss


def _counted(head: ClassHead, labels: Tensor, weight: Tensor | None, samples: list[int]) -> Tensor:
    """Return the samples of each micro-batch that count in the mean, or their weights: float64, on the host."""
    counts_B = torch.ones(len(labels), dtype=torch.float64) if weight is None else weight.detach().cpu().double()
    ignored = head.backend.settings.config.ignore_index
    if ignored is not None:
        counts_B = counts_B.masked_fill(labels.cpu() == ignored, 0.0)
    return torch.stack([part.sum() for part in torch.split(counts_B, samples)])


@contextlib.contextmanager
def _reducing(backbone: nn.Module, last: bool) -> Iterator[None]:
    """Run a forward pass of one micro-batch: DDP prepares to reduce once for all of them, and copies its buffers
    once."""
    with contextlib.ExitStack() as contexts:
        if not last:
            for module in backbone.modules():
                if isinstance(module, DistributedDataParallel):
                    contexts.enter_context(module.no_sync())
        yield
