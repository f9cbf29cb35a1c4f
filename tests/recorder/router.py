"""Sends each operation to the host, which is real, or to the device, which only has shapes, and counts the latter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.flop_counter import flop_registry

from geartrain.bridge.kernels.launch import Cost
from scripts.kernels.model import DEVICES
from tests.recorder.report import Report, our_line

DEVICE = DEVICES["H100"]
CUDA = torch.device("cuda", 0)

_WITHOUT_KERNEL = frozenset(
    [
        "empty",
        "empty_like",
        "new_empty",
        "empty_strided",
        "new_empty_strided",
        "resize_",
        "set_",
        "is_same_size",
        "lift_fresh",
        "lift",
        "detach",
        "alias",
        "_unsafe_view",
        "_reshape_alias",
        "as_strided",
        "record_stream",
        "device",
        "sym_size",
        "sym_stride",
        "sym_numel",
    ]
)
_SIZES_ON_HOST = frozenset(
    [
        "nonzero",
        "bincount",
        "masked_select",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
        "equal",
        "is_nonzero",
        "nonzero_static",
    ]
)
"""Whose result, or its size, the host must know."""
_GATHERS = frozenset(["index", "index_select", "gather", "embedding", "_unsafe_index", "take"])
_SCATTERS = frozenset(
    ["index_put_", "index_put", "_index_put_impl_", "index_copy_", "index_add_", "scatter_", "scatter_add_"]
)
_INDEXED = frozenset(["index", "index_put_", "index_put", "_index_put_impl_", "_unsafe_index"])
_FALSE = frozenset(["any", "eq", "ne", "lt", "gt", "le", "ge", "logical_not"])
"""What checks ask for and do not want to see; ``all`` and ``isfinite`` they do."""


class PinnedMemory:
    """Which memory of the host was asked for as pinned; it is held, so that no other takes its place."""

    def __init__(self) -> None:
        self._held: list[tuple[int, int, Any]] = []

    def add(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._held.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes(), storage))
        return tensor

    def holds(self, tensor: Tensor) -> bool:
        if isinstance(tensor, FakeTensor):
            return False
        with _disable_current_modes():
            place = tensor.data_ptr()
        return any(first <= place < stop for first, stop, _ in self._held)

    def copy_of(self, tensor: Tensor) -> Tensor:
        with _disable_current_modes():
            return self.add(tensor.clone())


def _tensors(tree: Any) -> list[Tensor]:
    return [item for item in tree_flatten(tree)[0] if isinstance(item, Tensor)]


def described(tree: Any) -> str:
    """Its numbers, those of the host's tensors, and the shapes of tensors on the device."""

    def told(item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        if isinstance(item, FakeTensor):
            return f"{item.dtype} {list(item.shape)} {list(item.stride())}"
        with _disable_current_modes():
            return f"of the host: {item.tolist()}"

    return str(tree_map(told, tree))


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class Router(TorchDispatchMode):
    """Counts in ``report``."""

    def __init__(self, report: Report, pinned: PinnedMemory) -> None:
        super().__init__()
        self._report, self._pinned = report, pinned
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = dict(kwargs or {})
        name: str = func.overloadpacket.__name__
        tensors = _tensors((args, kwargs))
        fakes = [item for item in tensors if isinstance(item, FakeTensor)]
        reals = [item for item in tensors if not isinstance(item, FakeTensor)]
        device = kwargs.get("device")
        wanted = None if device is None else torch.device(device).type
        if not fakes and wanted != "cuda":
            return self._on_host(func, args, kwargs)
        if name == "_local_scalar_dense":
            self._report.wait("item")
            return self._scalar(fakes[0])
        if name == "_to_copy" and wanted == "cpu":
            return self._to_host(fakes[0], kwargs)
        if wanted == "cpu":  # as large as one on the device
            with _disable_current_modes():
                return func(*tree_map(_like_on_host, args), **kwargs)
        if name == "_to_copy" and wanted == "cuda" and reals:
            return self._to_device(reals[0], kwargs)
        if name == "copy_" and reals:
            return self._between(args, kwargs)
        if any(item.ndim for item in reals):
            args, kwargs = self._mixed(func, name, args, kwargs)
        if (waited := self._of_unknown_size(name, args, kwargs)) is not None:
            return waited
        kwargs.pop("pin_memory", None)
        with self._fake:
            out = func(*args, **kwargs)
        self._count(func, name, args, kwargs, out)
        return out

    def _on_host(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        pin = kwargs.pop("pin_memory", None)
        with _disable_current_modes():
            out = func(*args, **kwargs)
        return self._pinned.add(out) if pin and isinstance(out, Tensor) else out

    def _to_host(self, source: Tensor, kwargs: dict[str, Any]) -> Tensor:
        self._report.wait("copy to the host")
        self._report.to_host[our_line()] += _nbytes(source)
        with _disable_current_modes():
            return torch.full(source.shape, self._scalar(source), dtype=kwargs.get("dtype") or source.dtype)

    def _to_device(self, source: Tensor, kwargs: dict[str, Any]) -> Tensor:
        if not (kwargs.get("non_blocking") and self._pinned.holds(source)):
            self._report.wait("pageable or blocking copy to the device")
        self._report.to_device[our_line()] += _nbytes(source)
        with _disable_current_modes():
            values = source.to(kwargs.get("dtype") or source.dtype, copy=True)
        moved = self._on_device(values)
        moved._values = values  # type: ignore[attr-defined]
        return moved

    def _between(self, args: Any, kwargs: dict[str, Any]) -> Tensor:
        """``copy_`` between host and device."""
        target, source = args[0], args[1]
        upwards = isinstance(target, FakeTensor)
        non_blocking = bool((len(args) > 2 and args[2]) or kwargs.get("non_blocking"))
        if not (non_blocking and self._pinned.holds(source if upwards else target)):
            self._report.wait(f"pageable or blocking copy to the {'device' if upwards else 'host'}")
        (self._report.to_device if upwards else self._report.to_host)[our_line()] += _nbytes(source)
        if not upwards:
            with _disable_current_modes():
                target.fill_(0 if _is_integer(source) else self._scalar(source))
        return target

    def _mixed(self, func: Any, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Count what CUDA refuses, and what it copies by itself; then go on as if all were on the device."""
        if name in _INDEXED and isinstance(args[0], FakeTensor):
            self._report.wait("index of the host copied to the device")
        else:
            self._report.mixtures[f"{func} @ {our_line(3)}"] += 1

        def moved(item: Any) -> Any:
            is_ours = isinstance(item, Tensor) and not isinstance(item, FakeTensor) and item.ndim
            return self._on_device(item) if is_ours else item

        out: tuple[Any, Any] = tree_map(moved, (args, kwargs))
        return out

    def _of_unknown_size(self, name: str, args: Any, kwargs: Any) -> Any:
        """The result of an operation for whose size the host waits, as large as it may be; None for others."""
        masked = name in _INDEXED and any(
            item.dtype in (torch.bool, torch.uint8) for item in args[1] if isinstance(item, Tensor)
        )
        repeated = name == "repeat_interleave" and kwargs.get("output_size") is None
        values = getattr(args[0], "_values", None) if repeated else None
        if name not in _SIZES_ON_HOST and not masked and not repeated:
            return None
        self._report.wait(name)
        first: Tensor = args[0]
        if name == "equal":
            return True
        if name == "bincount":
            out: Any = self._empty((max(first.numel(), *args[2:], kwargs.get("minlength", 0)),), torch.int64)
        elif name == "nonzero":
            out = self._empty((first.numel(), first.ndim), torch.int64)
        elif name in ("_unique2", "unique_consecutive", "unique_dim"):
            numbers = self._empty((first.numel(),), torch.int64)
            out = self._empty((first.numel(),), first.dtype), numbers, numbers
        elif name == "index":
            (mask,) = (item for item in args[1] if item is not None)
            out = self._empty((mask.numel(), *first.shape[mask.ndim :]), first.dtype)
        elif name in _SCATTERS:
            out = first
        else:
            size = first.numel() if values is None else int(values.sum())
            out = self._empty((size,), torch.int64 if repeated else first.dtype)
        cost = Cost(sum(map(_nbytes, [first, *_tensors(out)])))
        self._report.count(name, cost, DEVICE.seconds(cost))
        return out

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        with self._fake:
            return torch.empty(shape, dtype=dtype, device=CUDA)

    def _on_device(self, like: Tensor) -> Tensor:
        with self._fake:
            return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=CUDA)

    def _scalar(self, source: Tensor) -> Any:
        if source.dtype == torch.bool:
            return getattr(source, "_says", True)
        return 1.0 if source.dtype.is_floating_point else self._report.integers

    def _count(self, func: Any, name: str, args: Any, kwargs: Any, out: Any) -> None:
        self._report.trace.append(f"{func} {described((args, kwargs, out))}")
        source = args[0] if args and isinstance(args[0], Tensor) else None
        if isinstance(out, Tensor) and out.dtype == torch.bool:
            flipped = name.startswith(("logical_not", "bitwise_not"))
            is_view = func.is_view or name in _WITHOUT_KERNEL
            before = getattr(source, "_says", True)
            out._says = (  # type: ignore[attr-defined]
                before if is_view else not before if flipped else name not in _FALSE
            )
        if func.is_view or name in _WITHOUT_KERNEL:
            return
        ins, outs = _tensors((args, kwargs)), _tensors(out)
        distinct = {id(item): item for item in ins + outs if item.device.type == "cuda"}
        if not distinct:
            return
        num_bytes = sum(map(_nbytes, distinct.values()))
        if name in _GATHERS:
            num_bytes = 2 * sum(map(_nbytes, outs))
        elif name in _SCATTERS:
            num_bytes = 3 * sum(map(_nbytes, ins[1:]))
        elif func._schema.is_mutable and source is not None and len(distinct) > 1 and name != "copy_":
            num_bytes += _nbytes(source)
        flops = 0
        packet = getattr(torch.ops.aten, name.removesuffix("_"), func.overloadpacket)
        if (formula := flop_registry.get(packet)) is not None:
            flops = formula(*args, **kwargs, out_val=out)
        operands = [item.dtype for item in ins if item.dtype.is_floating_point]
        cost = Cost(num_bytes, flops, min(operands, key=lambda dtype: dtype.itemsize, default=torch.float32))
        self._report.count(name, cost, DEVICE.seconds(cost))


def _like_on_host(item: Any) -> Any:
    return torch.empty(item.shape, dtype=item.dtype) if isinstance(item, FakeTensor) else item


def _is_integer(tensor: Tensor) -> bool:
    return not tensor.dtype.is_floating_point and tensor.dtype != torch.bool


class Functions(TorchFunctionMode):
    """What torch would ask of memory that is not there, before operations are sent anywhere."""

    def __init__(self, report: Report, pinned: PinnedMemory) -> None:
        super().__init__()
        self._report, self._pinned = report, pinned

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        tensor = args[0] if args and isinstance(args[0], Tensor) else None
        if name in ("tensor", "as_tensor") and not isinstance(tensor, FakeTensor):
            device = kwargs.pop("device", None)
            device = torch.get_default_device() if device is None else torch.device(device)
            made = func(*args, device="cpu", **kwargs)
            return made.to(device) if device.type == "cuda" else made
        if tensor is not None and name == "pin_memory":
            return self._pinned.copy_of(tensor)
        if tensor is not None and name == "is_pinned":
            return self._pinned.holds(tensor)
        if isinstance(tensor, FakeTensor):
            if name == "numpy" and kwargs.get("force"):
                return tensor.detach().cpu().numpy()
            if name == "numpy":
                raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")
        return func(*args, **kwargs)
