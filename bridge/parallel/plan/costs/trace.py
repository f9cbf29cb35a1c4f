"""What a module computes, operation by operation: traced on the meta device, where nothing is allocated or computed.

An operation takes the longer of two times, that of its arithmetic and that of its bytes (Williams et al., Roofline,
2009), and what it takes to begin it. Products have arithmetic, by torch's own formulas; all others have bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.hooks import RemovableHandle

from geartrain.ams.values.errors import GeartrainError, InvalidArgument
from geartrain.bridge.parallel.plan.costs.collectives import Collective, Kind, Phase
from geartrain.bridge.parallel.plan.costs.rates import Rates
from geartrain.bridge.parallel.scopes import called_parts

_READS_WHAT_IT_PICKS = {"embedding", "index_select", "index", "gather", "nll_loss_forward"}
"""Operations that look at no more of their first tensor than at their result."""
_EXPONENTIALS = {
    *("_log_softmax", "_softmax", "exp", "log", "logsumexp", "tanh", "sigmoid", "gelu", "silu"),
    *("_log_softmax_backward_data", "gelu_backward", "silu_backward", "exp2", "softplus", "erf"),
}
_NO_WORK = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach", "record_stream"}


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation on tensors."""

    name: str
    dtype: str
    flops: int = 0
    """Of products; a multiplication and an addition are two."""
    bytes: int = 0
    """Read and written together."""
    fresh_bytes: int = 0
    """Of the results that are new tensors."""
    largest_result: int = 0
    """Bytes of the largest of them."""
    exponentials: int = 0

    def seconds(self, hardware: Rates) -> float:
        """On a device of ``hardware``."""
        fits = self.bytes <= hardware.cache_bytes and hardware.cache_bandwidth is not None
        bandwidth = hardware.cache_bandwidth if fits else hardware.memory_bandwidth
        assert bandwidth is not None
        times = [self.bytes / bandwidth, self.flops / hardware.flops_of(self.dtype)]
        if hardware.exponentials is not None:
            times.append(self.exponentials / hardware.exponentials)
        fresh = 0.0
        if hardware.fresh_bandwidth is not None and self.largest_result >= hardware.fresh_bytes:
            fresh = self.fresh_bytes / hardware.fresh_bandwidth
        return max(times) + fresh + hardware.operation_seconds


@dataclass(frozen=True)
class Work:
    """Operations that are done one after another, equal ones counted."""

    operations: tuple[tuple[Operation, int], ...] = ()

    @property
    def flops(self) -> int:
        """Of all products."""
        return sum(one.flops * times for one, times in self.operations)

    @property
    def bytes(self) -> int:
        """Read and written, were there no cache."""
        return sum(one.bytes * times for one, times in self.operations)

    @property
    def num_operations(self) -> int:
        """How many there are."""
        return sum(times for _, times in self.operations)

    def seconds(self, hardware: Rates) -> float:
        """Of all of them."""
        return sum(one.seconds(hardware) * times for one, times in self.operations)

    def __add__(self, other: Work) -> Work:
        counts = Counter(dict(self.operations))
        counts.update(dict(other.operations))
        return Work(tuple(counts.items()))


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What a traced step did: operations and collectives by the part of the model and the phase they belong to."""

    operations: Mapping[tuple[str, Phase], Work]
    collectives: tuple[tuple[str, Collective], ...]
    """In the order of their beginning, each with its part."""
    kept_bytes: Mapping[str, int]
    """By part: what its forward pass keeps for its backward pass, without inputs, parameters and buffers."""

    def work(self, part: str, phase: Phase) -> Work:
        """Of one part in one phase."""
        return self.operations.get((part, phase), Work())


REST = "(rest)"
"""The part of what no named module does: the loss, and the model's own forward."""


class StepTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operations of a step while it is entered; ``part`` and ``phase`` say what they belong to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.part = REST
        self.phase: Phase = "forward"
        self._operations: dict[tuple[str, Phase], Counter[Operation]] = {}
        self._collectives: list[tuple[str, Collective]] = []
        self._kept: dict[str, dict[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and note it."""
        del types
        out = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__.rstrip("_") or func._overloadpacket.__name__
        if not func.is_view and name not in _NO_WORK and func.namespace != "profiler":
            self.note(_operation(name, func, args, kwargs or {}, out))
        return out

    def note(self, operation: Operation, times: int = 1) -> None:
        """Add one that torch does not see."""
        self._operations.setdefault((self.part, self.phase), Counter())[operation] += times

    def note_collective(self, kind: Kind, what: str, num_bytes: int, ranks: int, *, on_host: bool) -> None:
        """Add one that ranks would take part in."""
        one = Collective(kind=kind, what=what, phase=self.phase, bytes=num_bytes, ranks=ranks, on_host=on_host)
        self._collectives.append((self.part, one))

    def keep(self, tensor: Tensor, known: Set[StorageWeakRef]) -> None:
        """Note what autograd keeps for the backward pass, unless its memory is ``known``."""
        storage = _storage(tensor)
        if storage not in known and not any(storage in kept for kept in self._kept.values()):
            self._kept.setdefault(self.part, {})[storage] = tensor.untyped_storage().nbytes()

    def recorded(self) -> Recorded:
        """All of it."""
        return Recorded(
            operations={key: Work(tuple(counts.items())) for key, counts in self._operations.items()},
            collectives=tuple(self._collectives),
            kept_bytes={part: sum(kept.values()) for part, kept in self._kept.items()},
        )


def traced_step(
    model: nn.Module, parts: Sequence[str], run: Callable[[], Tensor], inputs: Any, trace: StepTrace
) -> Recorded:
    """What ``run()``, a forward pass of ``model`` that returns its loss, and its backward pass do; all on meta.

    ``parts`` are names of modules that operations are told apart by. Raises InvalidArgument if the model cannot run
    without values, and for a part that its forward does not call.
    """
    known = {_storage(one) for one in (*model.parameters(), *model.buffers(), *_tensors(inputs).values())}
    called: set[str] = set()
    hooks = [
        hook
        for name in parts
        for _, module in called_parts(name, model.get_submodule(name))
        for hook in _boundaries(module, name, trace, called)
    ]
    try:
        with torch.enable_grad(), trace:
            with torch.autograd.graph.saved_tensors_hooks(lambda one: _kept(trace, one, known), lambda one: one):
                loss = run()
            trace.part, trace.phase = REST, "backward"
            loss.backward()  # type: ignore[no-untyped-call]
    except GeartrainError:
        raise
    except Exception as exc:  # whatever the user's code raises
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
    return trace.recorded()


def _reason(exc: Exception) -> str:
    return next(iter(str(exc).splitlines()), "").rstrip(".") or type(exc).__name__


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _kept(trace: StepTrace, tensor: Tensor, known: Set[StorageWeakRef]) -> Tensor:
    trace.keep(tensor, known)
    return tensor


def _boundaries(module: nn.Module, name: str, trace: StepTrace, called: set[str]) -> Iterator[RemovableHandle]:
    """Hooks that let the trace know when it is within ``module``; backward, until the next part begins."""

    outer: list[str] = []

    def enter(*_: Any) -> None:
        called.add(name)
        outer.append(trace.part)
        trace.part = name

    def leave(module: nn.Module, inputs: Any, outputs: Any) -> None:
        del module, inputs
        trace.part = outer.pop()
        for one in _tensors(vars(outputs) if is_dataclass(outputs) else outputs).values():
            if one.requires_grad:
                one.register_hook(enter_backward)  # type: ignore[no-untyped-call]

    def enter_backward(gradient: Tensor) -> None:
        del gradient
        trace.part = name

    yield module.register_forward_pre_hook(enter)
    yield module.register_forward_hook(leave)


def _operation(name: str, func: Any, args: Any, kwargs: Any, out: Any) -> Operation:
    read = _tensors((args, kwargs))
    written = _tensors(out)
    results = [one for key, one in written.items() if key not in read]
    counter = flop_registry.get(func._overloadpacket)
    flops = int(counter(*args, **kwargs, out_val=out)) if counter is not None else 0
    written_bytes = sum(map(_bytes, written.values()))
    sizes = [_bytes(one) for one in read.values()]
    if name in _READS_WHAT_IT_PICKS and sizes:
        sizes[0] = min(sizes[0], written_bytes)
    largest = max(read.values(), key=_bytes, default=None)
    first = largest if largest is not None else next(iter(written.values()), None)
    return Operation(
        name=name,
        dtype=str(first.dtype).removeprefix("torch.") if first is not None else "float32",
        flops=flops,
        bytes=sum(sizes) + written_bytes,
        fresh_bytes=sum(map(_bytes, results)),
        largest_result=max(map(_bytes, results), default=0),
        exponentials=max((one.numel() for one in written.values()), default=0) if name in _EXPONENTIALS else 0,
    )


def _tensors(values: Any) -> dict[int, Tensor]:
    return {id(one): one for one in tree_leaves(values) if isinstance(one, Tensor)}


def _bytes(tensor: Tensor) -> int:
    """That lie in memory: of an expanded tensor no more than it has."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def traced_update(
    parameters: Sequence[nn.Parameter], make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
) -> tuple[Work, int]:
    """The work of one optimizer step over ``parameters`` (meta device), and the bytes of the optimizer's state.

    The step that is traced is the second: the first one makes the state. Raises InvalidArgument if it cannot step.
    """
    if not parameters:
        return Work(), 0
    trace = StepTrace()
    try:
        optimizer = make(list(parameters))
        for one in parameters:
            one.grad = torch.empty_like(one)
        optimizer.step()
        with trace:
            optimizer.step()
    except Exception as exc:  # whatever the user's code raises
        raise InvalidArgument(
            f"the optimizer cannot step without values, on the meta device: {_reason(exc)}. Give a function of a list "
            "of parameters that makes one whose step() needs no closure, as torch.optim.AdamW does"
        ) from exc
    state = {id(one): one for value in optimizer.state.values() for one in _tensors(value).values()}
    for one in parameters:
        one.grad = None
    return trace.recorded().work(REST, "forward"), sum(_bytes(one) for one in state.values())
