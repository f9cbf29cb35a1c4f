"""A step over micro-batches: equal to the step without, whatever the backbone, and no rank waits for one that fails."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import geartrain as gt
from geartrain.ams.values.errors import InvalidArgument, InvalidRows, NonFinite, SpecMismatch, SyncError
from geartrain.bridge.collectives import part_exchange
from geartrain.bridge.collectives.communicator import Pending
from tests.support import heads
from tests.support.rank_processes import on_ranks

CLASSES, DIM, INPUTS, NUM = 41, 6, 5, 3
SIZES = [7, 0, 4]

HEADS: dict[str, dict[str, Any]] = {
    "full, linear with biases": {"select": gt.FullSoftmax(), "bias": True, "label_smoothing": 0.1},
    "sampled, arc": {"select": gt.PartialFC(0.4), "margin": gt.ArcFace(16, 0.2)},
    "margin of the joint batch": {"select": gt.PartialFC(0.4), "margin": gt.AdaFace(16, 0.4)},
    "margin of the negatives": {"select": gt.FullSoftmax(), "margin": gt.CurricularFace(16, 0.3)},
    "margin that draws": {"select": gt.FullSoftmax(), "margin": gt.ElasticCosFace(16, 0.3, 0.05)},
    "sub-centers, sum": {"margin": gt.CosFace(16, 0.2), "sub_centers": 2, "reduction": "sum"},
    "every loss": {"margin": gt.MagFace(16), "reduction": "none"},
}


def backbone(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(INPUTS, 8), nn.Tanh(), nn.Linear(8, DIM)).to(dtype)


def head_of(**settings: Any) -> gt.ClassHead:
    return heads.make_head(None, "classes", num_classes=CLASSES, dim=DIM, rows="ranks", **settings)


def batch(rank: int, step: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    inputs = torch.randn(SIZES[rank], INPUTS, generator=generator, dtype=dtype)
    labels = torch.randint(CLASSES, (SIZES[rank],), generator=generator)
    labels[1::5] = -100
    return inputs, labels, torch.rand(SIZES[rank], generator=generator)


def trained(rank: int, make: Callable[[nn.Module, gt.ClassHead], nn.Module], **settings: Any) -> list[np.ndarray]:
    """Losses, gradients of the backbone and of the inputs, and rows, step after step; the second step has weights."""
    net, head = backbone(), head_of(**settings)
    model, rows = make(net, head), gt.RowOptimizer(head)
    found = []
    for step in range(2):
        inputs, labels, weight = batch(rank, step)
        inputs.requires_grad_()
        loss = model(inputs, labels, weight if step else None)
        loss.backward(torch.full_like(loss, 1.0 + rank))
        rows.step()
        found += [loss.detach(), inputs.grad, *(weight.grad for weight in net.parameters())]
    return [np.asarray(value) for value in (*found, head.weights())]


class Whole(nn.Module):
    def __init__(self, net: nn.Module, head: gt.ClassHead) -> None:
        super().__init__()
        self.net, self.head = net, head

    def forward(self, images: Tensor, labels: Tensor, weight: Tensor | None) -> Tensor:
        loss: Tensor = self.head(self.net(images), labels, weight)
        return loss


@on_ranks(3)
def test_loss_gradients_and_rows_are_those_of_the_whole_batch(rank: int) -> None:
    for number, (name, settings) in enumerate(HEADS.items()):
        expected = trained(rank, Whole, **settings)
        for overlap in (True, False)[: 2 - bool(number)]:
            found = trained(rank, lambda net, head, on=overlap: gt.MicroBatches(net, head, NUM, overlap=on), **settings)
            for mine, theirs in zip(found[:-1], expected[:-1], strict=True):
                np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=1e-9, err_msg=f"{name}, overlap={overlap}")
            np.testing.assert_allclose(found[-1], expected[-1], rtol=0, atol=1e-6, err_msg=name)


EXACT = ("full, linear with biases", "sub-centers, sum")
"""All classes are active, and a sample's loss is its own."""


def trained_part_by_part(rank: int, num: int, dtype: torch.dtype, head: gt.ClassHead) -> list[np.ndarray]:
    """Losses, gradients of the backbone, and rows, of two steps; the second has weights. ``num`` 0: the whole batch."""
    net, rows = backbone(dtype), gt.RowOptimizer(head)
    step = gt.MicroBatches(net, head, num or 1)
    found = []
    for number in range(2):
        inputs, labels, weight = batch(rank, number, dtype)
        given = weight if number else None
        loss = step.backward(inputs, labels, given) if num else step(inputs, labels, given)
        if not num:
            loss.backward()
        rows.step()
        found += [loss.detach(), *(weight.grad for weight in net.parameters())]
    return [np.asarray(value) for value in (*found, head.weights())]


@on_ranks(3)
def test_micro_batches_that_go_backward_one_by_one_add_up_to_the_whole_batch(rank: int) -> None:
    for name in EXACT:
        settings = {"select": gt.FullSoftmax(), **HEADS[name]}
        expected, *found = (
            trained_part_by_part(rank, num, torch.float64, head_of(**settings)) for num in (0, 1, NUM, 5)
        )
        for of_num in found:
            for mine, theirs in zip(of_num[:-1], expected[:-1], strict=True):
                np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=1e-9, err_msg=name)
            np.testing.assert_allclose(of_num[-1], expected[-1], rtol=0, atol=1e-6, err_msg=name)


def test_a_step_of_micro_batches_is_one_push_of_one_process_too(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for num in (0, 4):
        with gt.local() as cluster:
            head = heads.make_head(cluster, "classes", num_classes=CLASSES, dim=DIM, select=gt.FullSoftmax())
            prepare = mock.Mock(wraps=head.table.prepare_push)
            monkeypatch.setattr(head.table, "prepare_push", prepare)
            found.append(trained_part_by_part(0, num, torch.float64, head))
            assert prepare.call_count == 2
            few, labels, _ = batch(0, 0)
            gt.MicroBatches(backbone(), head, 9).backward(few[:2], labels[:2])  # more micro-batches than samples
    for mine, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("num", [1, 4, 9])
def test_rows_step_once_at_the_end_of_the_last_backward_pass(num: int) -> None:
    found = []
    for is_within in (False, True):
        with gt.local() as cluster:
            head = heads.make_head(cluster, num_classes=CLASSES, dim=DIM, select=gt.FullSoftmax())
            net, rows, steps = backbone(), gt.RowOptimizer(head), list[object]()
            rows.register_step_post_hook(lambda *_, steps=steps: steps.append(1))
            inputs, labels, _ = batch(0, 0)
            step = gt.MicroBatches(net, head, num)
            step.backward(inputs, labels, rows=rows, reduces=False)  # of a batch that is not the step's last
            step.backward(inputs[:6], labels[:6], rows=rows if is_within else None)  # perhaps fewer than num
            if not is_within:
                rows.step()
            assert len(steps) == 1
            found.append(head.weights())
    assert torch.equal(*found)


PEAK = """
import pathlib, re, sys, torch, geartrain as gt
from torch import nn
def peak():  # of this program alone: ru_maxrss begins with that of the process that started it
    return int(re.search(r"VmHWM:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1])
torch.set_num_threads(1), torch.manual_seed(0)
net = nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.Sigmoid(),
                    nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 64))
head = gt.ClassHead(None, "c", num_classes=30_000, dim=64, rows="ranks", select=gt.FullSoftmax(),
                    config=gt.HeadConfig(logits_cache_bytes=1 << 30))
step, rows = gt.MicroBatches(net, head, int(sys.argv[1])), gt.RowOptimizer(head)
images, labels = torch.randn(256, 1, 48, 48), torch.randint(30_000, (256,))
step.backward(images[:8], labels[:8]), rows.step()
before = peak()
for _ in range(2):
    step.backward(images, labels), rows.step()
print(before, peak())
"""


def test_eight_micro_batches_need_less_than_half_of_the_activations_and_logits() -> None:
    def peak(num: int) -> tuple[int, int]:
        done = subprocess.run([sys.executable, "-c", PEAK, str(num)], capture_output=True, text=True, check=True)
        before, highest = map(int, done.stdout.split())
        return highest - before, highest

    (whole, whole_process), (few, few_process) = peak(1), peak(8)
    assert few <= 0.5 * whole, (few, whole)
    assert few_process <= 0.8 * whole_process, (few_process, whole_process)


def replicated(net: nn.Sequential) -> nn.Module:
    return DistributedDataParallel(net)


def replicated_layers(net: nn.Sequential) -> nn.Module:
    return nn.Sequential(DistributedDataParallel(net[0]), net[1], DistributedDataParallel(net[2]))


def with_batch_norm(net: nn.Sequential) -> nn.Module:
    return DistributedDataParallel(nn.Sequential(net, nn.BatchNorm1d(DIM, dtype=torch.float64)))


def sharded(net: nn.Sequential) -> nn.Module:
    for layer in (net[0], net[2], net):
        fully_shard(layer)
    return net


def gradients(
    rank: int, wrap: Callable[[nn.Sequential], nn.Module], num: int, *, one_by_one: bool = False
) -> tuple[np.ndarray, int]:
    """Of the backbone after three steps, and how often DDP reduced a bucket."""
    reduced: list[int] = []
    net, head = wrap(backbone()), head_of(margin=gt.CosFace(16, 0.2), select=gt.FullSoftmax())
    for module in net.modules():
        if isinstance(module, DistributedDataParallel):
            module.register_comm_hook(reduced, lambda noted, bucket: noted.append(1) or allreduce_hook(None, bucket))
    step, rows = gt.MicroBatches(net, head, num), gt.RowOptimizer(head)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for number in range(3):
        optimizer.zero_grad()
        inputs, labels, _ = batch(0 if rank == 0 else 2, number)
        images, classes = torch.cat([inputs] * 4), torch.cat([labels] * 4)
        if one_by_one:
            step.backward(images, classes)
        else:
            step(images, classes).backward()
        optimizer.step()
        rows.step()
    whole = [
        parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter for parameter in net.parameters()
    ]
    return torch.cat([item.detach().reshape(-1) for item in whole]).numpy(), len(reduced)


@on_ranks(2)
def test_ddp_and_fsdp2_reduce_once_for_all_micro_batches(rank: int) -> None:
    for wrap, buckets in ((replicated, 1), (replicated_layers, 2), (sharded, 0)):
        (found, times), (expected, _) = (gradients(rank, wrap, num) for num in (4, 1))
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-7, err_msg=wrap.__name__)
        assert times == 3 * buckets, wrap.__name__
        found, times = gradients(rank, wrap, 5, one_by_one=True)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-7, err_msg=wrap.__name__)
        assert times == 3 * buckets, wrap.__name__
    assert gradients(rank, with_batch_norm, 2)[1] == 3  # its buffers are copied once a step


class Noting(nn.Module):
    """A backbone that says when it works."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.net, self.events, self.passes = backbone(), events, 0

    def forward(self, images: Tensor) -> Tensor:
        number, self.passes = self.passes, self.passes + 1
        self.events.append(f"forward {number}")
        features: Tensor = self.net(images)
        features.register_hook(lambda _grad: self.events.append(f"backward {number}"))
        return features


@on_ranks(2)
def test_features_and_their_gradients_travel_while_the_backbone_works_two_at_a_time(rank: int) -> None:
    events: list[str] = []
    monkeypatch = pytest.MonkeyPatch()

    def noting(kind: str) -> None:
        start = getattr(part_exchange.Communicator, f"start_{kind}")

        def begin(self: Any, tensor: Tensor, sizes: list[int]) -> Pending[Tensor]:
            if tensor.ndim < 2:
                return start(self, tensor, sizes)
            events.append(f"{kind} begun")
            pending = start(self, tensor, sizes)
            taken = pending.result

            def take() -> Tensor:
                events.append(f"{kind} taken")
                return taken()

            pending.result = take
            return pending

        monkeypatch.setattr(part_exchange.Communicator, f"start_{kind}", begin)

    noting("gather")
    noting("sum_to_owners")
    step = gt.MicroBatches(Noting(events), head_of(margin=gt.ArcFace(16, 0.2)), 4)
    gt.RowOptimizer(step.head)
    inputs, labels, _ = batch(2, rank)
    step(inputs, labels).backward()
    monkeypatch.undo()
    begun, taken = "sum_to_owners begun", "sum_to_owners taken"
    assert events == [
        *("forward 0", "gather begun", "forward 1", "gather begun"),
        *("forward 2", "gather taken", "gather begun", "forward 3", "gather taken", "gather begun"),
        *("gather taken", "gather taken", begun, begun),
        *(taken, begun, "backward 3", taken, begun, "backward 2", taken, "backward 1", taken, "backward 0"),
    ]


class Failing(nn.Module):
    """A backbone that fails in one micro-batch."""

    def __init__(self, at: int | None, failure: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.at, self.failure, self.passes = backbone(), at, failure, 0

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.net(images)
        self.passes += 1
        return self.failure(features) if self.at == self.passes - 1 else features


def breaks(features: Tensor) -> Tensor:
    raise RuntimeError(f"broke on {len(features)} samples")


@on_ranks(2)
def test_a_failure_in_any_micro_batch_is_raised_on_every_rank(rank: int) -> None:
    head = head_of(margin=gt.ArcFace(16, 0.2))
    rows = gt.RowOptimizer(head)
    inputs, labels, _ = batch(0, rank)
    cases: list[tuple[Callable[[Tensor], Tensor], type[Exception], str]] = [
        (breaks, RuntimeError, "broke on"),
        (lambda features: features * torch.nan, NonFinite, "NaN or infinity"),
        (lambda features: features[:-1], InvalidRows, "of micro-batch"),
        (lambda features: features.float(), InvalidArgument, "must be alike"),
    ]
    for failure, error, text in cases:
        for at in range(NUM):
            if at == 0 and error is InvalidArgument:
                continue  # ranks that differ in their first features have an error of their own
            step = gt.MicroBatches(Failing(at if rank == 1 else None, failure), head, NUM)
            with pytest.raises(error if rank == 1 else SyncError, match=text if rank == 1 else "rank 1 failed in"):
                step(inputs, labels)
            if error is not InvalidArgument:  # there each micro-batch is one whose features ranks may differ in
                step.backbone.at, step.backbone.passes = at if rank == 1 else None, 0
                with pytest.raises(error if rank == 1 else SyncError):
                    step.backward(inputs, labels)
                rows.zero_grad()
            step.backbone.at = None
            step(inputs, labels).backward()  # nothing was left on its way
            rows.step()
    with pytest.raises(SpecMismatch, match="num is 2 on rank 0, 3 on rank 1"):
        gt.MicroBatches(backbone(), head, 2 + rank)
    with pytest.raises(SyncError if rank else InvalidArgument, match="its error tells" if rank else "must be a torch"):
        gt.MicroBatches(backbone(), head, NUM)(inputs, labels if rank else labels.float())


@on_ranks(2)
def test_ranks_may_differ_in_whose_features_need_gradients_and_heads_may_be_at_rest(rank: int) -> None:
    head, net = head_of(margin=gt.ArcFace(16, 0.2)), backbone()
    step, plain = gt.MicroBatches(net, head, NUM), Whole(net, head)
    inputs, labels, _ = batch(0, 0)
    net.requires_grad_(rank == 0)
    for model in (plain, step):
        model(inputs, labels, None).backward()
        head.row_update.discard()
    net.requires_grad_()
    step.eval()
    found = [torch.autograd.grad(model(inputs, labels, None), list(net.parameters())) for model in (plain, step)]
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)
    loss = step(inputs, labels)
    first = torch.autograd.grad(loss, net[0].weight, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(loss, net[0].weight), first)
    with torch.inference_mode():
        torch.testing.assert_close(step(inputs, labels), plain(inputs, labels, None))


def test_other_heads_see_the_whole_batch_once() -> None:
    inputs, labels, weight = batch(0, 0, torch.float32)
    net = backbone(torch.float32)
    with gt.local() as cluster:
        head = gt.ClassHead(cluster, "classes", num_classes=CLASSES, dim=DIM, select=gt.PartialFC(0.4))
        step = gt.MicroBatches(net, head, NUM)
        assert not head.takes_parts
        torch.testing.assert_close(step(inputs, labels, weight), head(net(inputs), labels, weight))

    class Both(NamedTuple):
        left: Tensor
        right: Tensor

    class Pair(nn.Module):
        def forward(self, images: dict[str, Both]) -> Tensor:
            return images["both"].left + images["both"].right

    mean = gt.MicroBatches(Pair(), nn.MSELoss(), NUM)
    torch.testing.assert_close(mean({"both": Both(inputs, inputs)}, 2 * inputs), torch.zeros(()))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: gt.MicroBatches(backbone(), nn.MSELoss(), 0), "num is 0"),
        (lambda: gt.MicroBatches(len, nn.MSELoss(), 2), "backbone is"),  # type: ignore[arg-type]
        (lambda: gt.MicroBatches(backbone(), len, 2), "head is"),  # type: ignore[arg-type]
        (
            lambda: gt.MicroBatches(backbone(), nn.MSELoss(), 2)(torch.ones(3, INPUTS), torch.ones(4)),
            r"tensor \[4, …\]",
        ),
        (
            lambda: gt.MicroBatches(backbone(), nn.MSELoss(), 2).backward(torch.ones(3), torch.ones(3)),
            "no gt.ClassHead",
        ),
        (lambda: gt.MicroBatches(backbone(), nn.MSELoss(), 2)("images", torch.ones(4)), "images are 'images'"),
    ],
)
def test_what_cannot_be_divided_is_refused(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        call()
