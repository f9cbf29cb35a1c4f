"""DistributedDataParallel's averaging of replicated gradients, with errors that name their cause."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from geartrain.ams.values.errors import InvalidArgument, RankLost
from geartrain.bridge.collectives.communicator import (
    Communicator,
    Pending,
    all_gather_tensor,
    lost_ranks_named,
    reduce_scatter_tensor,
)


class BackwardPasses:
    """Refuses a second backward pass from the output of forward passes if DDP would not average it.

    DDP averages once after a forward pass, when every gradient has arrived; later additions stay those of the rank.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        """Register hooks on the ``parameters`` that record each gradient; they stay."""
        self._missing: set[int] = set()
        self._is_local = True
        self._ids = {id(parameter) for parameter in parameters}
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]

    def forward_begins(self, *, averages: bool) -> None:
        """Record the start of a forward pass. ``averages``: False inside ``no_sync()``, where passes only add up."""
        self._is_local = not averages
        if averages:
            self._missing = set(self._ids)

    def forward_ends(self, output: Any) -> None:
        """Record the ``output`` of a forward pass, from which the user may go backward."""
        for leaf in tree_leaves(output):
            tensor = getattr(leaf, "local_BL", leaf)  # of split logits
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(self._goes_backward)  # type: ignore[no-untyped-call]

    def _accumulated(self, parameter: Tensor) -> None:
        self._missing.discard(id(parameter))

    def _goes_backward(self, gradient: Tensor) -> None:
        del gradient
        if not self._is_local and not self._missing:
            raise InvalidArgument(
                "backward() was called twice after the last forward pass, and the second gradients would not be "
                "averaged over the ranks. Go backward before the next forward pass, or once from the sum of the "
                "losses; accumulate under model.no_sync(). Call optimizer.zero_grad() before you go on"
            )


class AverageHook:
    """DDP's own averaging of CPU gradients, as a communication hook, so that a rank lost in it raises RankLost."""

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self._link = Communicator(process_group)
        self._begun: list[tuple[torch.futures.Future[Tensor], Tensor, Pending[Tensor] | None]] = []
        self._failure: Exception | None = None

    def register(self, ddp: DistributedDataParallel) -> None:
        """Register the hook, unless ``ddp`` has one already."""
        if getattr(ddp, "_comm_hooks", None):
            return
        try:
            ddp.register_comm_hook(self, _on_bucket)
        except RuntimeError as exc:
            if "once" not in str(exc):  # an error of C++ about a hook that only DDP's reducer knows of
                raise

    def on_bucket(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Average a bucket; DDP calls it for each in order, once its gradients are complete."""
        if bucket.index() == 0:
            self._begun, self._failure = [], None
        if bucket.is_last():  # before DDP's own callback, which waits for the futures at the end of the pass
            Variable._execution_engine.queue_callback(self._finish)
        buffer = bucket.buffer().mul_(1 / self._link.world_size)
        pending = None
        try:
            pending = self._link.start_sum(buffer)
        except RankLost as exc:
            self._failure = exc
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        self._begun.append((future, buffer, pending))
        return future

    def _finish(self) -> None:
        begun, self._begun = self._begun, []
        for future, buffer, pending in begun:
            try:
                if pending is not None:
                    pending.result()
            except RankLost as exc:
                self._failure = self._failure or exc
            future.set_result(buffer)
        if self._failure is not None:  # DDP must end its pass first
            Variable._execution_engine.queue_callback(self._raise_failure)

    def _raise_failure(self) -> NoReturn:
        failure, self._failure = self._failure, None  # it holds its caller's frames, and DDP in them
        assert failure is not None
        raise failure


def _on_bucket(hook, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations, as objects
    return hook.on_bucket(bucket)


def name_lost_ranks(sharded: Any) -> None:
    """Make a lost rank in a module under ``fully_shard`` raise RankLost."""
    sharded.set_custom_all_gather(_Named("all-gather", all_gather_tensor))
    sharded.set_custom_reduce_scatter(_Named("reduce-scatter", reduce_scatter_tensor))


class _Named:
    """A collective of FSDP2, in which a lost rank raises RankLost."""

    def __init__(self, operation: str, run: Callable[..., dist.Work | None]) -> None:
        self._operation, self._run = operation, run

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, **options: Any
    ) -> dist.Work | None:
        with lost_ranks_named(self._operation, group):
            return self._run(output_tensor, input_tensor, group=group, **options)
