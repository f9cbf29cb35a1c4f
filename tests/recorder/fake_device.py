"""Makes this process believe in a CUDA device. What it replaces stays replaced: a process of its own records."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from tests.recorder.report import Report
from tests.recorder.router import CUDA, DEVICE, Functions, PinnedMemory, Router, described


def install(report: Report) -> PinnedMemory:
    """Stand in for what of torch.cuda and of the project needs memory of a device; for good."""
    pinned = PinnedMemory()

    def require_no_capture(what: str) -> None:
        if _of("kernels.launch").is_capturing(CUDA):
            raise RuntimeError(f"{what}: operation not permitted when stream is capturing")

    class Stream:
        device, cuda_stream = CUDA, 0

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...
        def wait_stream(self, other: Any) -> None: ...
        def wait_event(self, event: Any) -> None: ...
        def record_event(self, event: Any = None) -> Any:
            return event or Event()

        def synchronize(self) -> None:
            report.wait("stream.synchronize")

        def query(self) -> bool:
            return True

        def __enter__(self) -> Stream:
            return self

        def __exit__(self, *args: object) -> None: ...

    class Event:
        number = 0

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...
        def wait(self, *args: Any) -> None: ...
        def record(self, *args: Any) -> None:  # noqa: ARG002
            require_no_capture("event.record")
            report.events += 1
            self.number = report.events

        def query(self) -> bool:
            require_no_capture("event.query")
            return self.number <= max(report.known, report.before)  # those of earlier steps are over

        def synchronize(self) -> None:
            if self.number > report.known:
                events = report.events
                report.wait("event.synchronize")
                report.known = min(self.number, events)

    cuda: Any = torch.cuda
    cuda.Stream, cuda.Event, cuda.stream = Stream, Event, lambda stream: stream
    cuda.current_stream = cuda.default_stream = lambda device=None: Stream()  # noqa: ARG005
    cuda.synchronize = lambda device=None: report.wait("cuda.synchronize")  # noqa: ARG005
    cuda.is_available = lambda: True
    cuda.is_current_stream_capturing = lambda: False
    cuda._lazy_init = lambda: None
    cuda.current_device = lambda: 0
    cuda.device_count = lambda: 1
    cuda.is_bf16_supported = lambda including_emulation=True: True  # noqa: ARG005
    cuda.get_device_capability = lambda device=None: (9, 0)  # noqa: ARG005
    cuda.mem_get_info = lambda device=None: (70 << 30, 80 << 30)  # noqa: ARG005
    tensor: Any = Tensor
    address = tensor.data_ptr
    tensor.data_ptr = lambda self: id(self) if isinstance(self, FakeTensor) else address(self)
    fake: Any = FakeTensor
    fake.tolist = lambda self: self.cpu().tolist()
    tensor.record_stream = lambda self, stream: None  # noqa: ARG005
    tensor.pin_memory = lambda self, *args: pinned.copy_of(self)  # noqa: ARG005
    tensor.is_pinned = lambda self, *args: pinned.holds(self)  # noqa: ARG005
    module: Any = torch.nn.Module
    module._apply = _apply
    _stand_in_for_ours()
    return pinned


def _apply(module: Any, function: Any, recurse: bool = True) -> Any:
    """``torch.nn.Module._apply``: fakes lie in no tensor of the host, so that parameters are made anew."""
    for child in module.children() if recurse else ():
        child._apply(function)
    for key, parameter in module._parameters.items():
        with torch.no_grad():
            moved = None if parameter is None else function(parameter)
        if moved is not None and moved is not parameter:
            module._parameters[key] = torch.nn.Parameter(moved, parameter.requires_grad)
    for key, buffer in module._buffers.items():
        module._buffers[key] = None if buffer is None else function(buffer)
    return module


def _of(name: str) -> Any:
    """A module of the bridge."""
    return importlib.import_module(f"geartrain.bridge.{name}")


def _stand_in_for_ours() -> None:
    """A fake cannot be another class, nor lie in a tensor of the host; and initial rows are no step."""

    _of("placements.device_rows").DeviceRows.write_initial_values = lambda rows: None  # noqa: ARG005
    for module in ("rows.native_types", "placements.workspace"):
        _of(module).gives_float32_products = lambda device, dtype: True  # noqa: ARG005
    pending = _of("rows.pending")
    pending.StandInGradient = type("Plain", (), {"of": staticmethod(lambda grad, *_, **__: grad)})
    pending.PendingUpdate._shown = lambda update: update.carrier.grad

    def on(update: Any, device: torch.device) -> Tensor:
        if update.carrier.device.type != device.type:
            update.carrier = torch.zeros(1, device=device, requires_grad=True)
            update._unchanged = torch.ones(1, device=device)
        stand_in: Tensor = update.stand_in  # on the host
        return stand_in

    pending.PendingUpdate.on = on
    pending.PendingUpdate.stand_in_on = lambda update, device: update.stand_in  # noqa: ARG005


@contextlib.contextmanager
def recording(report: Report, pinned: PinnedMemory) -> Iterator[None]:
    """Inside, tensors made on "cuda" are fakes, and what is done with them is counted."""
    launches = _of("kernels.launch")

    def started(kernel: Any, cost: Any, start: Any) -> None:
        function = getattr(kernel, "fn", kernel)
        report.count(getattr(function, "__name__", str(kernel)), cost, DEVICE.seconds(cost), ours=True)
        start()

    def noted(kernel: Any, grid: Any, args: Any, options: Any) -> None:
        report.trace.append(f"{getattr(kernel, '__name__', kernel)} {grid} {described(args)} {described(options)}")

    # Backward passes on this thread, too: a place is told by all lines that lead there.
    one_thread = torch.autograd.set_multithreading_enabled(False)
    ours = mock.patch.object(launches, "run", noted)
    with one_thread, ours, launches.observed(started), Functions(report, pinned), Router(report, pinned):
        yield
