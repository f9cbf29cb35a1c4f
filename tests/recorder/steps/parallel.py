"""Steps of models that are split or replicated over ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn

import geartrain as gt
from geartrain.bridge.collectives.communicator import Communicator
from geartrain.bridge.parallel.topk.bucket import WELL, BucketLayout, BucketWork, SgdSettings
from geartrain.bridge.parallel.topk.state import GradientState
from tests.recorder.dry_ranks import dry_ranks
from tests.recorder.report import Report


@contextlib.contextmanager
def split(
    report: Report, classes: int = 100_000, dim: int = 512, batch: int = 256, autocast: str = "bfloat16"
) -> Iterator[Callable[[], None]]:
    """A split linear layer and its cross entropy, all on one rank."""
    with torch.device("cuda"):
        whole = nn.Sequential(nn.Linear(dim, dim), nn.Linear(dim, classes))
        scopes = {"0": gt.Replicate(), "1": gt.Split()}
        model = gt.parallelize(whole, gt.mesh(), scopes, loss=nn.CrossEntropyLoss())

    def step() -> None:
        samples = torch.empty(batch, dim, device="cuda")
        labels = torch.empty(batch, dtype=torch.int64, device="cuda")
        report.reset()
        with torch.autocast("cuda", getattr(torch, autocast)) if autocast else contextlib.nullcontext():
            loss = model(samples, labels)
        loss.backward()
        model.zero_grad()

    yield step


@contextlib.contextmanager
def topk(report: Report, ranks: int = 8, tensors: int = 4, numel: int = 1_600_000) -> Iterator[Callable[[], None]]:
    """One bucket of sparsified gradients: ``tensors`` of ``numel`` that travel sparse, and a bias that does not."""
    with dry_ranks(ranks, report):
        names = [f"p{number}" for number in range(tensors)]
        parameters = {name: nn.Parameter(torch.empty(numel, device="cuda")) for name in names}
        parameters["bias"] = nn.Parameter(torch.empty(64, device="cuda"))
        layout = BucketLayout(list(parameters), list(parameters.values()), [numel // 1000] * tensors + [64])
        state = GradientState(parameters, set(names), decays=False)
        report.integers = 0  # all is well

        def step() -> None:
            buffer = torch.empty(sum(layout.numels), device="cuda")
            settings = SgdSettings(0.9, False, 0.0)
            report.reset()
            work = BucketWork(layout, buffer, state, Communicator(), update=settings, may_be_unused=False)
            work.start(WELL, None, keep=False)
            if work.failure is not None:
                raise work.failure
            work.receive().cpu()
            work.apply()

        yield step
