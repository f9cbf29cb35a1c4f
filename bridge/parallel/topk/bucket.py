"""DDP bucket with sparsified tensors: the message of a rank, and the update from the ranks' mean.

A bucket is a flat buffer with the gradients of some parameters, one after another. For the sparse ones a rank sends
int32 [2 · K + 1]: the bits of K float32 values, K indices, and a status.

Legend: R ranks, K selected elements of all sparse tensors of a bucket.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from geartrain.ams.values.errors import NonFinite
from geartrain.bridge.collectives.communicator import Communicator, Pending
from geartrain.bridge.parallel.topk.compaction import CompiledCompaction, TensorCompaction, finite_of
from geartrain.bridge.parallel.topk.state import GradientState, in_memory_order, taken_out

WELL, NOT_STEPPED, FAILED = 0, -1, -2
"""Status of a rank; n + 1: the gradient of tensor n of the bucket is not finite there."""
_WITH_STATE = 1 << 30
"""Added to n + 1: tensor n's gradient is finite, but not with its accumulated momentum or residual."""
_NOTHING = 2**31 - 1


def is_state_error(status: int) -> bool:
    """Return whether the gradient is finite, but not with momentum and residual: no other gradient repairs that."""
    return status > _WITH_STATE


def tensor_of(status: int) -> int:
    """Return the number of the tensor that is not finite."""
    return status % _WITH_STATE - 1


@dataclass(frozen=True)
class SgdSettings:
    """Settings of the SGD optimizer that turns gradients into an update."""

    momentum: float
    nesterov: bool
    weight_decay: float


class BucketLayout:
    """Places of parameters in a bucket; depends only on the parameters and the sparsity."""

    def __init__(self, names: Sequence[str], parameters: Sequence[nn.Parameter], ks: Sequence[int]) -> None:
        """``ks``: number of elements sent of each tensor; a dense tensor sends all."""
        self.names, self.parameters = list(names), list(parameters)
        self.numels = [parameter.numel() for parameter in parameters]
        self.dense = [number for number, (k, numel) in enumerate(zip(ks, self.numels, strict=True)) if k == numel]
        self.sparse = [number for number in range(len(ks)) if number not in set(self.dense)]
        self.ks = [ks[number] for number in self.sparse]
        sizes, device = [self.numels[number] for number in self.sparse], parameters[0].device
        on_host = device.type == "cpu"
        self.compaction = CompiledCompaction(sizes, self.ks) if on_host else TensorCompaction(sizes, self.ks, device)
        starts = [0, *itertools.accumulate(self.numels)]
        index_type = torch.int32 if starts[-1] < 2**31 else torch.int64
        self.starts_K = torch.cat(
            [torch.zeros(0, dtype=index_type)]
            + [torch.full((k,), starts[n], dtype=index_type) for n, k in zip(self.sparse, self.ks, strict=True)]
        ).to(device)
        """Start in the bucket of each selected element's tensor."""
        sparse, dense = (torch.tensor(numbers, dtype=torch.int32) + 1 for numbers in (self.sparse, self.dense))
        self.sparse_codes_2T = torch.stack([sparse, sparse + _WITH_STATE]).to(device)
        self.dense_codes_T = dense.to(device)
        """Status of a rank if a tensor is not finite."""


class BucketWork:
    """Work on one bucket in one backward pass."""

    def __init__(
        self,
        layout: BucketLayout,
        buffer: Tensor,
        state: GradientState,
        link: Communicator,
        *,
        update: SgdSettings,
        may_be_unused: bool,
    ) -> None:
        """``may_be_unused``: whether a gradient of zeros may mean that the parameter was not used."""
        self.layout = layout
        self.buffer = buffer
        self._state = state
        self._link = link
        self._update = update
        self._may_be_unused = may_be_unused
        self._gathered: Pending[Tensor] | None = None
        self._summed: Pending[Tensor] | None = None
        self.failure: Exception | None = None
        self.begun: Future[None] | None = None
        """Result of :meth:`start`, if a thread runs it."""
        self.future: torch.futures.Future[Tensor] = torch.futures.Future(
            devices=[buffer.device] if buffer.is_cuda else None
        )
        """Future that DDP waits for: the buffer, once the optimizer may apply it."""
        self._parts_RW = buffer.new_zeros(0, dtype=torch.int32)
        self._means = buffer[:0]

    @torch.no_grad()
    def start(self, status: int, factor: Tensor | None, *, keep: bool) -> None:
        """Accumulate and select if ``status`` is WELL, then start to send.

        Where that fails, it sends FAILED and keeps the error as ``failure``.

        Args:
            status: WELL or NOT_STEPPED.
            factor: Scalar by which the gradients are multiplied first; None: 1.
            keep: Whether to save copies of momentum and residuals first, so that they can be put back.
        """
        if factor is not None:
            self.buffer.mul_(factor)
        segments = parts_of(self.buffer, self.layout.numels)
        if self.layout.sparse:
            try:
                if keep:
                    self._state.save([self.layout.names[number] for number in self.layout.sparse])
                sent = self._packed([segments[number] for number in self.layout.sparse], status)
            except Exception as exc:  # of any kind: the other ranks wait for this one's message
                self.failure = exc
                sent = self.buffer.new_full((2 * sum(self.layout.ks) + 1,), FAILED, dtype=torch.int32)
            self._gathered = self._link.start_gather(sent, [len(sent)] * self._link.world_size)
        if self.layout.dense:
            parts = [segments[number] for number in self.layout.dense]
            self._summed = self._link.start_sum(torch.cat(parts) if self.layout.sparse else self.buffer)

    def receive(self) -> Tensor:
        """Wait for the other ranks; return int32 [R + 1]: the status of each, and that of the dense tensors' means."""
        num_ranks, found = self._link.world_size, self.buffer.new_zeros(0, dtype=torch.int32)
        said_R, of_means = found.new_zeros(num_ranks), found.new_zeros(1)
        if self._gathered is not None:
            self._parts_RW = self._gathered.result().view(num_ranks, -1)
            said_R = self._parts_RW[:, -1]
        if self._summed is not None:
            self._means = self._summed.result().div_(num_ranks)
            if self._means.is_cuda or not torch.isfinite(self._means).all():
                of_means = first_bad(finite_of(self._dense_means()), self.layout.dense_codes_T)
        return torch.cat([said_R, of_means])

    @torch.no_grad()
    def apply(self) -> None:
        """Write the optimizer's update to the bucket."""
        means = self._dense_means()
        self._step_dense(means)
        if not self.layout.sparse:
            if not self._means.is_set_to(self.buffer):
                self.buffer.copy_(self._means)
            return
        self._add_peers()
        segments = parts_of(self.buffer, self.layout.numels)
        for number, mean in zip(self.layout.dense, means, strict=True):
            segments[number].copy_(mean)
        if self._state.decay:
            self._decay([(number, segments[number]) for number in self.layout.sparse])

    def _packed(self, gradients: list[Tensor], status: int) -> Tensor:
        """Return this rank's message: int32 [2 · K + 1]."""
        names = [self.layout.names[number] for number in self.layout.sparse]
        momenta, residuals = ([kind[name] for name in names] for kind in (self._state.momentum, self._state.residual))
        self._state.loaded.difference_update(names)
        num_selected = sum(self.layout.ks)
        indices, values = gradients[0].new_zeros(num_selected, dtype=torch.int32), momenta[0].new_zeros(num_selected)
        update = self._update
        unused = [n for n, gradient in enumerate(gradients) if self._may_be_unused and not gradient.any()]
        untouched = [(kind[n], kind[n].clone()) for n in unused for kind in (momenta, residuals)]
        said = indices.new_full((1,), status)
        compaction = self.layout.compaction if status == WELL else None
        if isinstance(compaction, TensorCompaction):
            indices, values, are_finite = compaction.start(
                gradients, momenta, residuals, momentum=update.momentum, nesterov=update.nesterov
            )
            said = first_bad(are_finite, self.layout.sparse_codes_2T)
        elif compaction is not None:
            try:
                indices, values = compaction.compact(
                    gradients, momenta, residuals, momentum=update.momentum, nesterov=update.nesterov
                )
            except NonFinite:
                said = indices.new_full((1,), self._what_is_bad(gradients, momenta, residuals))
        for tensor, before in untouched:
            tensor.copy_(before)
        segments = parts_of(values, self.layout.ks)
        for number in unused:
            segments[number].zero_()
        return torch.cat([values.view(torch.int32), indices, said])

    def _what_is_bad(self, gradients: list[Tensor], momenta: list[Tensor], residuals: list[Tensor]) -> int:
        """Return the status of the first tensor whose gradient is not finite; if all are, of the first whose gradient
        is not finite once momentum and residual are added."""
        for number, gradient in zip(self.layout.sparse, gradients, strict=True):
            if not torch.isfinite(gradient).all():
                return 1 + number
        for number, gradient, u, v in zip(self.layout.sparse, gradients, momenta, residuals, strict=True):
            if not torch.isfinite(v + self._update.momentum * u + gradient).all():
                return _WITH_STATE + 1 + number
        return _WITH_STATE + 1 + self.layout.sparse[0]

    def _dense_means(self) -> Sequence[Tensor]:
        return parts_of(self._means, [self.layout.numels[number] for number in self.layout.dense])

    def _add_peers(self) -> None:
        """Write the mean of the ranks' messages to the bucket, added in the ranks' order so that it is equal on all."""
        num_selected = sum(self.layout.ks)
        total = (
            self.buffer.zero_()
            if self.buffer.dtype == torch.float32
            else self.buffer.new_zeros(len(self.buffer), dtype=torch.float32)
        )
        for part_W in self._parts_RW:
            values_K = part_W[:num_selected].view(torch.float32) / self._link.world_size
            total.index_add_(0, part_W[num_selected:-1] + self.layout.starts_K, values_K)
        if total is not self.buffer:
            self.buffer.copy_(total)

    def _step_dense(self, means: Sequence[Tensor]) -> None:
        """Replace each mean gradient by the update of SGD with momentum."""
        taking_part = [
            (number, mean)
            for number, mean in zip(self.layout.dense, means, strict=True)
            if not self._may_be_unused or mean.any()
        ]
        if not taking_part:
            return
        update, state = self._update, self._state
        names = [self.layout.names[number] for number, _ in taking_part]
        momenta = [state.momentum[name] for name in names]
        targets = [mean for _, mean in taking_part]
        gradients = [mean.to(momentum.dtype) for mean, momentum in zip(targets, momenta, strict=True)]
        if update.weight_decay:
            weights = [in_memory_order(self.layout.parameters[number]) for number, _ in taking_part]
            torch._foreach_add_(gradients, weights, alpha=update.weight_decay)
        loaded = [(name, target) for name, target in zip(names, targets, strict=True) if name in state.loaded]
        for name, _ in loaded:
            if (decay := taken_out(state.decay, name, stays=name in state.sparse)) is not None:
                state.momentum[name].add_(decay)
        torch._foreach_mul_(momenta, update.momentum)
        torch._foreach_add_(momenta, gradients)
        if update.nesterov:
            torch._foreach_add_(gradients, momenta, alpha=update.momentum)
        torch._foreach_copy_(targets, gradients if update.nesterov else momenta)
        for name, target in loaded:  # as merged, so the same on every rank
            state.loaded.discard(name)
            if (residual := taken_out(state.residual, name, stays=name in state.sparse)) is not None:
                target.add_(residual)

    def _decay(self, segments: list[tuple[int, Tensor]]) -> None:
        """Add the update of weight decay with momentum. Every rank has the same weights, so nothing is sent."""
        update = self._update
        for number, segment in segments:
            if self._may_be_unused and not segment.any():
                continue
            momentum = self._state.decay.get(self.layout.names[number])
            if momentum is None:
                continue
            decayed = in_memory_order(self.layout.parameters[number]).to(torch.float32) * update.weight_decay
            momentum.mul_(update.momentum).add_(decayed)
            segment.add_(decayed.add_(momentum, alpha=update.momentum) if update.nesterov else momentum)


def first_bad(are_finite: Tensor, codes: Tensor) -> Tensor:
    """Return the lowest of the codes whose tensors are not finite, int32 [1]; WELL if all are finite."""
    return codes.masked_fill(are_finite, _NOTHING).amin().remainder(_NOTHING).view(1)


def parts_of(flat: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """Return views of ``sizes`` elements, one after the other."""
    parts: Sequence[Tensor] = torch.split(flat, list(sizes))
    return parts
