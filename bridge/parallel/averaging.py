"""What DistributedDataParallel does to replicated gradients, with errors that name what happened."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from geartrain.ams.values.errors import InvalidArgument, RankLost
from geartrain.bridge.collectives.link import RankLink, all_gather_tensor, reduce_scatter_tensor
from geartrain.bridge.collectives.pending import Pending
from geartrain.bridge.collectives.traffic import lost_ranks_named


class BackwardPasses:
    """Refuses a backward pass whose gradients DDP would not average.

    DDP averages in the first backward pass after a forward pass, and in no other: the gradients of a second one would
    stay those of the rank alone.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._awaits_backward = False
        self._is_local = True
        self._averaged_pass = -1
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]

    def forward_begins(self, *, averages: bool) -> None:
        """``averages``: False inside ``no_sync()``, where passes only add up."""
        self._awaits_backward, self._is_local = averages, not averages

    def _accumulated(self, parameter: Tensor) -> None:
        """A backward pass has come to a parameter."""
        del parameter
        number = torch._C._current_graph_task_id()
        if self._is_local or number == self._averaged_pass:
            return
        if not self._awaits_backward:
            raise InvalidArgument(
                "backward() was called twice after the last forward pass, and the second gradients would not be "
                "averaged over the ranks. Go backward before the next forward pass, or once from the sum of the "
                "losses; accumulate under model.no_sync(). Call optimizer.zero_grad() before you go on"
            )
        self._awaits_backward, self._averaged_pass = False, number


class AverageHook:
    """DDP's own averaging as a communication hook over gloo, so that a rank that is lost in it is RankLost."""

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self._link = RankLink(process_group)
        self._begun: list[tuple[torch.futures.Future[Tensor], Tensor, Pending[Tensor] | None]] = []
        self._failure: Exception | None = None

    def register(self, ddp: DistributedDataParallel) -> None:
        """Unless ``ddp`` has a hook already."""
        try:
            ddp.register_comm_hook(self, _on_bucket)
        except RuntimeError as exc:
            if "once" not in str(exc):
                raise

    def on_bucket(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Called by DDP for each bucket in order, once its gradients are there."""
        if bucket.index() == 0:
            self._begun, self._failure = [], None
        if bucket.is_last():  # before DDP's own, which waits for the futures at the end of the pass
            Variable._execution_engine.queue_callback(self._finish)
        buffer = bucket.buffer().div_(self._link.world_size)
        pending = None
        try:
            pending = self._link.start_sum(buffer)
        except RankLost as exc:
            self._failure = exc
        self._begun.append((torch.futures.Future(), buffer, pending))
        return self._begun[-1][0]

    def _finish(self) -> None:
        begun, self._begun = self._begun, []
        for future, buffer, pending in begun:
            try:
                if pending is not None:
                    pending.result()
            except RankLost as exc:
                self._failure = self._failure or exc
            future.set_result(buffer)
        if self._failure is not None:  # DDP is to end its pass before
            Variable._execution_engine.queue_callback(partial(_fail, self._failure))


def _on_bucket(hook, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations, as objects
    return hook.on_bucket(bucket)


def _fail(failure: Exception) -> NoReturn:
    raise failure


def name_lost_ranks(sharded: Any) -> None:
    """Let what a lost rank ends in a module under ``fully_shard`` be RankLost; PyTorch before 2.9 has no way to."""
    if not hasattr(sharded, "set_custom_reduce_scatter"):
        return
    sharded.set_custom_all_gather(_AllGather())
    sharded.set_custom_reduce_scatter(_ReduceScatter())


class _Memory:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Memory):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        with lost_ranks_named("all-gather"):
            work: dist.Work | None = all_gather_tensor(output_tensor, input_tensor, group=group, async_op=async_op)
            return work


class _ReduceScatter(_Memory):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        with lost_ranks_named("reduce-scatter"):
            work: dist.Work | None = reduce_scatter_tensor(
                output_tensor, input_tensor, op=op, group=group, async_op=async_op
            )
            return work
