"""Operations of a module, traced on the meta device, where nothing is allocated or computed.

Matrix products count arithmetic, by torch's own formulas; all other operations count bytes.

Legend: R ranks, n bytes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, is_dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.hooks import RemovableHandle

from geartrain.ams.values.errors import GeartrainError, InvalidArgument
from geartrain.bridge.parallel.plan.hardware import Hardware
from geartrain.bridge.parallel.plan.meta import MetaMode, meta_like
from geartrain.bridge.parallel.scopes import called_parts

Kind = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "send"]
Phase = Literal["forward", "backward", "update"]

FEATURES, FEATURE_GRADIENTS = "features", "gradients of features"
"""Data that travel between replicated and split parts."""
REST = "(rest)"
"""Part of operations outside the named modules: the loss, and the model's own forward."""

_READS_WHAT_IT_PICKS = {"embedding", "index_select", "index", "gather", "nll_loss_forward"}
"""Operations that read no more of their first tensor than the size of their result."""
_NO_WORK = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach", "record_stream"}


@dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective of all ranks in a ring, limited by the slowest link."""

    kind: Kind
    what: str
    """Data that it carries, such as "features"."""
    phase: Phase
    """Phase in which it begins."""
    bytes: int
    """Bytes of the tensor on one rank: of an all-gather the output, of a reduce-scatter the input."""
    ranks: int

    @property
    def is_of_features(self) -> bool:
        """Whether each micro-batch has one."""
        return self.what in (FEATURES, FEATURE_GRADIENTS)

    @property
    def sent_bytes(self) -> int:
        """Bytes that each rank sends: 2 n (R-1)/R of an all-reduce, half of that gathered or reduce-scattered.

        Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms (2009).
        """
        part = (self.ranks - 1) / self.ranks
        factors = {"all-reduce": 2 * part, "broadcast": min(1.0, self.ranks - 1), "send": min(1.0, self.ranks - 1)}
        return round(self.bytes * factors.get(self.kind, part))

    def seconds(self, hardware: Hardware) -> float:
        """Return sent bytes over the slowest link's bandwidth, plus a latency for each round.

        R-1 rounds, 1 of a send. An all-reduce has 2 (R-1), or log2(R) exchanges of everything, whichever is faster
        (Thakur et al., Optimization of collective communication operations in MPICH, 2005).
        """
        if self.ranks == 1:
            return 0.0
        bandwidth, latency = hardware.link(self.ranks)
        turns = {"send": 1, "all-reduce": 2 * (self.ranks - 1)}.get(self.kind, self.ranks - 1)
        seconds = self.sent_bytes / bandwidth + turns * latency
        if self.kind == "all-reduce":
            return min(seconds, math.ceil(math.log2(self.ranks)) * (latency + self.bytes / bandwidth))
        return seconds


class StepTrace(MetaMode):  # type: ignore[no-untyped-call]
    """Adds up, while it is entered, the times of operations on ``hardware``, by the current ``part`` and ``phase``.

    Attributes: ``seconds`` of computation by part and phase; ``collectives`` in order, each with its part.
    """

    def __init__(self, hardware: Hardware) -> None:
        super().__init__()
        self.part = REST
        self.phase: Phase = "forward"
        self.seconds: Counter[tuple[str, Phase]] = Counter()
        self.collectives: list[tuple[str, Collective]] = []
        self.hardware = hardware
        self._kept: dict[str, dict[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and record it."""
        out = super().__torch_dispatch__(func, types, args, kwargs)
        name = func._overloadpacket.__name__.rstrip("_") or func._overloadpacket.__name__
        if func.is_view or name in _NO_WORK or func.namespace == "profiler":
            return out
        read, written = _tensors((args, kwargs or {})), _tensors(out)
        counter = flop_registry.get(func._overloadpacket)
        written_bytes = sum(map(_bytes, written))
        sizes = [_bytes(tensor) for tensor in read]
        largest = max(read or written, key=_bytes, default=None)
        if name in _READS_WHAT_IT_PICKS and sizes:
            sizes[0] = min(sizes[0], written_bytes)
        self.record(
            flops=0 if counter is None else int(counter(*args, **(kwargs or {}), out_val=out)),
            num_bytes=sum(sizes) + written_bytes,
            dtype="float32" if largest is None else str(largest.dtype).removeprefix("torch."),
        )
        return out

    def record(self, *, flops: int, num_bytes: int, dtype: str = "float32") -> None:
        """Add an operation of ``flops``; a multiplication and an addition are two."""
        self.seconds[self.part, self.phase] += self.hardware.operation(flops, num_bytes, dtype)  # type: ignore[assignment]

    def record_collective(self, kind: Kind, what: str, num_bytes: int, ranks: int) -> None:
        """Add a collective of ``ranks``."""
        collective = Collective(kind=kind, what=what, phase=self.phase, bytes=num_bytes, ranks=ranks)
        self.collectives.append((self.part, collective))

    def record_kept(self, tensor: Tensor, known: Set[StorageWeakRef]) -> Tensor:
        """Record a tensor that autograd keeps for the backward pass, unless its memory is ``known``."""
        storage = _storage(tensor)
        if storage not in known and not any(storage in kept for kept in self._kept.values()):
            self._kept.setdefault(self.part, {})[storage] = tensor.untyped_storage().nbytes()
        return tensor

    def kept_bytes(self, part: str) -> int:
        """Return bytes kept by the forward pass of ``part`` for its backward pass, without inputs, parameters and
        buffers."""
        return sum(self._kept.get(part, {}).values())


def traced_step(
    model: nn.Module, parts: Sequence[str], run: Callable[[], Tensor], inputs: Any, trace: StepTrace
) -> None:
    """Trace ``run()``, a forward pass of ``model`` that returns its loss, and its backward pass, on meta.

    ``parts`` are names of modules to which operations are assigned. Raises InvalidArgument if the model cannot run
    without values, and for a part that its forward does not call.
    """
    known = {_storage(tensor) for tensor in (*model.parameters(), *model.buffers(), *_tensors(inputs))}
    called: set[str] = set()
    hooks = [
        hook
        for name in parts
        for _, module in called_parts(name, model.get_submodule(name))
        for hook in _boundaries(module, name, trace, called)
    ]
    try:
        with torch.enable_grad(), trace:
            with torch.autograd.graph.saved_tensors_hooks(lambda one: trace.record_kept(one, known), lambda one: one):
                loss = run()
            trace.part, trace.phase = REST, "backward"
            loss.backward()  # type: ignore[no-untyped-call]
    except GeartrainError:
        raise
    except Exception as exc:  # the user's code may raise anything
        raise InvalidArgument(
            f"{type(model).__name__} or its loss cannot run without values, on the meta device: {_reason(exc)}. They "
            "must not look at values of tensors; give an example that is as one rank's batch"
        ) from exc
    finally:
        for hook in hooks:
            hook.remove()
    silent = [name for name in parts if name not in called]
    if silent:
        raise InvalidArgument(f"the model's forward does not call {silent[0]!r} on the example; name a module it calls")


def traced_update(
    parameters: Sequence[nn.Parameter], make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], hardware: Hardware
) -> tuple[float, int]:
    """Return seconds of one optimizer step over ``parameters`` (meta device), and the bytes of the optimizer's state.

    The second step is traced: the first one creates the state, unless it ``has_state`` before. Raises InvalidArgument
    if it cannot step.
    """
    if not parameters:
        return 0.0, 0
    trace = StepTrace(hardware)
    try:
        optimizer = make(list(parameters))
        for parameter in parameters:
            parameter.grad = meta_like(parameter)
        if not getattr(optimizer, "has_state", False):
            with MetaMode():
                optimizer.step()
        with trace:
            optimizer.step()
    except Exception as exc:  # the user's code may raise anything
        raise InvalidArgument(
            f"the optimizer cannot step without values, on the meta device: {_reason(exc)}. Give a function of a list "
            "of parameters that makes one whose step() needs no closure, as torch.optim.AdamW does"
        ) from exc
    for parameter in parameters:
        parameter.grad = None
    return sum(trace.seconds.values()), sum(map(_bytes, _tensors(list(map(dict, optimizer.state.values())))))


def _boundaries(module: nn.Module, name: str, trace: StepTrace, called: set[str]) -> Iterator[RemovableHandle]:
    """Yield hooks that mark when ``module`` runs; in the backward pass, until the next part begins."""
    outer: list[str] = []

    def enter(*_: Any) -> None:
        called.add(name)
        outer.append(trace.part)
        trace.part = name

    def leave(module: nn.Module, inputs: Any, outputs: Any) -> None:
        del module, inputs
        trace.part = outer.pop()
        for tensor in _tensors(vars(outputs) if is_dataclass(outputs) else outputs):
            if tensor.requires_grad:
                tensor.register_hook(enter_backward)  # type: ignore[no-untyped-call]

    def enter_backward(gradient: Tensor) -> None:
        del gradient
        trace.part = name

    yield module.register_forward_pre_hook(enter)
    yield module.register_forward_hook(leave)


def _reason(exc: Exception) -> str:
    return next(iter(str(exc).splitlines()), "").rstrip(".") or type(exc).__name__


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _tensors(values: Any) -> list[Tensor]:
    return list({id(leaf): leaf for leaf in _leaves(values) if isinstance(leaf, Tensor)}.values())


def _leaves(values: Any) -> Iterator[Any]:
    """Yield what ``tree_leaves`` returns, several times as fast for the arguments of operations."""
    if type(values) in (tuple, list, dict):
        for value in values.values() if isinstance(values, dict) else values:
            yield from _leaves(value)
    elif isinstance(values, Tensor) or values is None or type(values) in (int, float, bool):
        yield values
    else:
        yield from tree_leaves(values)


def _bytes(tensor: Tensor) -> int:
    """Return allocated bytes: of an expanded tensor only those it has."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())
