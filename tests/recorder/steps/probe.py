"""A step of known operations, by which the recorder is tested."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from geartrain.bridge.kernels.launch import Cost, launch
from geartrain.bridge.rows.transfers import DeviceEvent, Readback, download, upload, upload_together
from tests.recorder.report import Report


def twice() -> None:
    """Stands for a kernel."""


@contextlib.contextmanager
def probe(report: Report, what: str = "plain") -> Iterator[Callable[[], None]]:
    """One of the functions below."""
    made = torch.empty(64, 32, device="cuda"), torch.empty(64, 32, device="cuda")
    host = torch.arange(64)

    def step() -> None:
        report.reset()
        _PROBES[what](*made, host)

    yield step


def _plain(a: torch.Tensor, b: torch.Tensor, host: torch.Tensor) -> None:
    """Two launches, and a third of ours; views cost nothing, nor does what the host does for itself."""
    torch.mm(a, b.t()).relu_()
    (host + 1).sum().item()
    launch(twice, (4,), a, cost=Cost(1000.0, 2000.0, torch.bfloat16))


def _waiting(a: torch.Tensor, b: torch.Tensor, host: torch.Tensor) -> None:
    """Six waits."""
    float(a.sum())
    a.cpu()
    host.to("cuda")
    torch.nonzero(a)
    a[a > 0]
    b[host]


def _patient(a: torch.Tensor, b: torch.Tensor, host: torch.Tensor) -> None:
    """One wait for several things."""
    upload(host, a.device)
    upload_together([host, host.float()], a.device)
    before = Readback(a.sum())
    download(a + b)
    before.values()
    DeviceEvent(a.device)


def _mixed(a: torch.Tensor, b: torch.Tensor, host: torch.Tensor) -> None:
    """One mixture of devices; numbers may be of the host."""
    a * torch.tensor(2.0)
    b + host.float()[:32]


_PROBES = {"plain": _plain, "waiting": _waiting, "patient": _patient, "mixed": _mixed}
