"""A plan lists the collectives of a step before it runs; here the step runs, and what it sent is counted."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from geartrain.ams.programs.selection import FullSoftmax
from geartrain.ams.values.errors import InvalidArgument
from geartrain.bridge.head.class_head import ClassHead
from geartrain.bridge.head.loss.margins.angular import ArcFace
from geartrain.bridge.parallel.mesh import mesh
from geartrain.bridge.parallel.parallelize import parallelize
from geartrain.bridge.parallel.plan.build import PlanRequest
from geartrain.bridge.parallel.plan.hardware import Hardware
from geartrain.bridge.parallel.plan.plan import Plan
from geartrain.bridge.parallel.scopes import Replicate, Scope, Split
from tests.support.rank_processes import on_ranks, run_ranks

HARDWARE = replace(Hardware.named("v100-25gbit"), device="cpu")
SAMPLES, CLASSES = 6, 51


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(12, 700), nn.ReLU(), nn.Linear(700, 600), nn.ReLU(), nn.Linear(600, 10))
        self.head = nn.Linear(10, CLASSES)

    def forward(self, images: Tensor) -> Any:
        return self.head(self.backbone(images))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, ids: Tensor) -> Any:
        return self.head(self.words(ids).mean(1))


class WithHead(nn.Module):
    def __init__(self, margin: Any) -> None:
        super().__init__()
        self.backbone = nn.Linear(12, 10)
        self.head = ClassHead(
            None, "sku", num_classes=CLASSES, dim=10, rows="ranks", margin=margin, select=FullSoftmax()
        )

    def forward(self, images: Tensor, labels: Tensor) -> Any:
        return self.head(self.backbone(images), labels)


def of_ranks(plan: Plan) -> tuple[Counter[str], Counter[str]]:
    """Calls and bytes by kind of what the ranks say to each other over a Communicator."""
    calls: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for collective in plan.collectives:
        if collective.collective.what not in ("gradients", "buffers"):
            calls[collective.collective.kind] += collective.times
            sizes[collective.collective.kind] += collective.bytes
    return calls, sizes


def averages(plan: Plan) -> list[int]:
    """Bytes of the buckets, the first one last."""
    found = [collective for collective in plan.collectives if collective.collective.what == "gradients"]
    return sorted(hit.collective.bytes for hit in found for _ in range(hit.times))


def run_and_count(model: nn.Module, scopes: dict[str, Scope], example: Any, loss: Any, ranks: int) -> None:
    """Two steps of ``model``; the second is counted and compared with the plan made before the first."""
    plan = PlanRequest.of(
        model, scopes, example, None, ranks=ranks, hardware=HARDWARE, loss=loss, optimizer=torch.optim.SGD
    ).plan()
    whole = mesh()
    parallel = parallelize(model, whole, scopes, loss=loss)
    with pytest.raises(InvalidArgument, match="no plan before its first batch"):
        _ = parallel.plan
    sent: list[int] = []

    def count(state: Any, bucket: Any) -> Any:
        del state
        sent.append(bucket.buffer().nbytes)
        return allreduce_hook(None, bucket)

    count.__annotations__.clear()  # DistributedDataParallel looks at them, and knows no text
    if parallel.ddp is not None:
        parallel.ddp.register_comm_hook(None, count)
    links = [whole.whole.link, *(part.backend.peers for part in model.modules() if isinstance(part, ClassHead))]
    for _ in range(2):
        for link in links:
            link.traffic.clear()
        sent.clear()
        parallel(*example).backward()
        for part in model.modules():
            if isinstance(part, ClassHead):
                part.row_update.apply(part.backend.settings.optimizer)  # type: ignore[attr-defined]
    calls, sizes = of_ranks(plan)
    assert sum((link.traffic.calls for link in links), Counter()) == calls
    assert sum((link.traffic.bytes for link in links), Counter()) == sizes
    assert sorted(sent) == averages(plan)
    of_model = parallel.plan_for(HARDWARE, torch.optim.SGD)
    assert (of_model.parts, of_model.collectives) == (plan.parts, plan.collectives)


def classifiers(ranks: int) -> None:
    images, labels = torch.randn(SAMPLES, 12), torch.randint(0, CLASSES, (SAMPLES,))
    loss = nn.CrossEntropyLoss()
    for head in (Replicate(), Split()):
        torch.manual_seed(0)
        run_and_count(Classifier(), {"backbone": Replicate(), "head": head}, (images, labels), loss, ranks)
    ids = torch.randint(0, 40, (SAMPLES, 3))
    run_and_count(
        Words(), {"words": Split(), "head": Split()}, (ids, labels), nn.CrossEntropyLoss(label_smoothing=0.1), ranks
    )


@on_ranks(2)
def test_steps_of_class_heads_send_what_was_planned(ranks: int) -> None:
    images, labels = torch.randn(SAMPLES, 12), torch.randint(0, CLASSES, (SAMPLES,))
    for margin in (None, ArcFace()):
        run_and_count(WithHead(margin), {"backbone": Replicate(), "head": Split()}, (images, labels), None, ranks)


def test_steps_of_replicated_and_split_layers_send_what_was_planned(tmp_path: Path) -> None:
    run_ranks(classifiers, 2, tmp_path)
    run_ranks(classifiers, 3, tmp_path)


def test_a_model_says_its_plan_without_asking_the_other_ranks() -> None:
    model = parallelize(Classifier(), mesh(), {"": Replicate(), "head": Split()}, loss=nn.CrossEntropyLoss())
    model(torch.randn(SAMPLES, 12), torch.zeros(SAMPLES, dtype=torch.int64)).backward()
    plan = model.plan
    assert "one process, measured, as if links cost nothing" in plan.explain()
    assert (plan.batch, plan.ranks, plan.collectives) == (SAMPLES, 1, ())


def test_a_model_that_cannot_be_copied_trains_and_has_no_plan() -> None:
    model = Classifier()
    model.lock = threading.Lock()  # type: ignore[assignment]
    parallel = parallelize(model, mesh(), {"": Replicate()}, loss=nn.CrossEntropyLoss())
    parallel(torch.randn(SAMPLES, 12), torch.zeros(SAMPLES, dtype=torch.int64)).backward()
    with pytest.raises(InvalidArgument, match="cannot be copied without its values"):
        _ = parallel.plan
