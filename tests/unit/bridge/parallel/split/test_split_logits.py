"""Logits that no rank holds whole: what may be done with them, in which types, and what a step of them costs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import geartrain as gt
from geartrain.ams.values.errors import InvalidArgument, InvalidIds, InvalidRows, SyncError
from tests.support.rank_processes import on_ranks, run_ranks

CLASSES, DIM, BATCH = 9, 5, 4


def made(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, CLASSES)).to(dtype)


def batch(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    return torch.randn(BATCH, DIM, dtype=dtype), torch.randint(0, CLASSES, (BATCH,))


def parallel(model: nn.Module) -> Any:
    return gt.parallelize(model, gt.mesh(), {"0": gt.Replicate(), "1": gt.Split()})


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def assert_equal_gradients(model: nn.Module, plain: nn.Module, **tolerance: float) -> None:
    for (name, item), (_, other) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        torch.testing.assert_close(
            whole(other.grad), whole(item.grad), msg=lambda text, name=name: f"{name}: {text}", **tolerance
        )


@on_ranks(1, 3)
def test_elementwise_work_and_whole_rows_are_those_of_ordinary_logits(rank: int, ranks: int) -> None:
    """Elementwise work before the loss, and all classes of the own samples, for autograd too."""
    inputs, labels = batch()
    for work in (
        lambda logits: 0.5 * -logits / 2 + 1 - 0.25,
        lambda logits: torch.tanh(logits) * 3,
        lambda logits: F.relu(torch.clamp(logits, -0.5, 0.5)).float(),
    ):
        model = made()
        plain = copy.deepcopy(model)
        net = parallel(model)
        given = F.cross_entropy(work(net(inputs[rank::ranks])), labels[rank::ranks])
        expected = F.cross_entropy(work(plain(inputs)), labels)
        torch.testing.assert_close(given, expected)
        given.backward()  # type: ignore[no-untyped-call]
        expected.backward()  # type: ignore[no-untyped-call]
        assert_equal_gradients(model, plain)
    model = made()
    plain = copy.deepcopy(model)
    net = parallel(model)
    logits = net(inputs[rank::ranks]).whole()
    torch.testing.assert_close(logits, plain(inputs[rank::ranks]))
    (logits.square().sum()).backward()
    plain(inputs).square().sum().backward()
    # The whole of a row is the rank's own affair: the gradients of a mean over ranks.
    for parameter in plain.parameters():
        assert parameter.grad is not None
        parameter.grad /= ranks
    assert_equal_gradients(model, plain)


@on_ranks(3)
def test_all_classes_are_given_and_go_backward_where_a_rank_has_no_class(rank: int, ranks: int) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, 4)).double()  # classes of each rank: 2, 2 and 0
    plain, (inputs, _) = copy.deepcopy(model), batch()
    net = parallel(model)
    whole_rows = net(inputs[rank::ranks]).whole()
    torch.testing.assert_close(whole_rows, plain(inputs[rank::ranks]))
    (whole_rows.square().sum() * ranks).backward()
    plain(inputs).square().sum().backward()
    assert_equal_gradients(model, plain)


@on_ranks(2)
def test_half_precision_and_autocast_keep_sums_in_32_bits(rank: int, ranks: int) -> None:
    inputs, labels = batch(torch.float32)
    for dtype in (torch.bfloat16, torch.float16):
        model = made(torch.float32)
        plain, exact = copy.deepcopy(model), copy.deepcopy(model)
        net = parallel(model)
        with torch.autocast("cpu", dtype):
            split = net(inputs[rank::ranks])
            assert split.dtype == dtype
            given, expected = F.cross_entropy(split, labels[rank::ranks]), F.cross_entropy(plain(inputs), labels)
        assert given.dtype == torch.float32
        torch.testing.assert_close(given, expected, rtol=1e-2, atol=1e-2)
        given.backward()  # type: ignore[no-untyped-call]
        F.cross_entropy(exact(inputs), labels).backward()  # type: ignore[no-untyped-call]
        assert_equal_gradients(model, exact, rtol=0.05, atol=0.01)
        half = made(dtype)
        embedding = nn.Embedding(CLASSES, DIM, dtype=dtype)
        words = gt.parallelize(embedding, gt.mesh(), {"": gt.Split()})
        assert torch.equal(words(labels), F.embedding(labels, whole(words.module.weight)))
        net = parallel(half)
        loss = F.cross_entropy(net(inputs[rank::ranks].to(dtype)), labels[rank::ranks])
        loss.backward()  # type: ignore[no-untyped-call]
        assert {parameter.grad.dtype for parameter in half.parameters() if parameter.grad is not None} == {dtype}


@on_ranks(2)
def test_a_loss_scaler_skips_a_split_layer_on_all_ranks(rank: int, ranks: int) -> None:
    """A gradient that overflows on one rank is skipped on all; the others step alike."""
    inputs, labels = batch(torch.float32)
    model = made(torch.float32)
    net = gt.parallelize(model, gt.mesh(), {"0": gt.Replicate(), "1": gt.Split()}, loss=nn.CrossEntropyLoss())
    optimizers = [torch.optim.SGD(part.parameters(), 0.1) for part in model]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = [whole(parameter).clone() for parameter in model.parameters()]
    for is_finite in (False, True):
        loss = net(inputs[rank::ranks], labels[rank::ranks])
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        if not is_finite and rank == ranks - 1:
            whole_gradient: Any = model[1].weight.grad
            whole_gradient.to_local()[0, 0] = torch.inf
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
        moved = [
            not torch.equal(whole(parameter), old) for parameter, old in zip(model.parameters(), before, strict=True)
        ]
        assert moved == ([True, True, False, False] if not is_finite else [True] * 4)


@on_ranks(2)
def test_what_split_logits_cannot_do_is_refused_on_every_rank(rank: int) -> None:
    inputs, labels = batch()
    net = parallel(made())
    logits = net(inputs)
    assert (logits.shape, logits.ndim, len(logits), logits.size(1)) == ((BATCH, CLASSES), 2, BATCH, CLASSES)
    assert not hasattr(logits, "softmax")
    for wrong, message in (
        (lambda: logits.softmax(1), r"\.softmax is not for logits"),
        (lambda: torch.softmax(logits, 1), "softmax is not for logits"),
        (lambda: logits @ torch.ones(CLASSES), "not for logits|unsupported"),
        (lambda: logits * torch.ones(CLASSES), "mul with a tensor is not for logits"),
        (lambda: F.cross_entropy(logits, labels, reduction="none"), "reduction is 'none'"),
        (lambda: F.cross_entropy(logits, labels, torch.ones(3)), r"weight has shape \(3,\)"),
        (lambda: F.cross_entropy(logits, labels, label_smoothing=2.0), "label_smoothing is 2.0"),
        (lambda: F.cross_entropy(logits, torch.rand(BATCH, CLASSES)), "tensor [S] of int64".replace("[", r"\[")),
    ):
        with pytest.raises((InvalidArgument, TypeError), match=message):
            wrong()
    with pytest.raises(InvalidIds if rank == 0 else SyncError, match="label 9 is no class" if rank == 0 else "rank 0"):
        F.cross_entropy(logits, torch.full_like(labels, CLASSES) if rank == 0 else labels)
    message = r"it takes features \[S, 5\]" if rank == 0 else "rank 0 failed"
    with pytest.raises(InvalidRows if rank == 0 else SyncError, match=message):
        net.module[1](inputs.unsqueeze(0) if rank == 0 else inputs)
    loss = F.cross_entropy(net(inputs), labels)
    loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    with pytest.raises(InvalidArgument, match="backward ran a second time"):
        loss.backward()  # type: ignore[no-untyped-call]


def count(rank: int, ranks: int, folder: Path) -> None:
    del folder
    inputs, labels = batch(torch.float32)
    scopes = {"0": gt.Replicate(), "1": gt.Split()}
    net = gt.parallelize(made(torch.float32), gt.mesh(), scopes, loss=nn.CrossEntropyLoss())
    traffic = net.mesh.whole.link.traffic
    traffic.clear()
    net(inputs[rank::ranks], labels[rank::ranks]).backward()
    # Two exchanges of six integers, the features, the labels; two all-reduces; the features' gradients.
    assert dict(traffic.calls) == {"all-gather": 4, "all-reduce": 2, "reduce-scatter": 1}
    assert traffic.bytes["all-gather"] == 2 * ranks * 6 * 8 + BATCH * DIM * 4 + BATCH * 8
    assert traffic.bytes["all-reduce"] == 4 * BATCH * 4
    assert traffic.bytes["reduce-scatter"] == BATCH * DIM * 4


@on_ranks(2)
def test_a_class_head_on_ranks_is_taken_as_it_is(rank: int, ranks: int) -> None:
    inputs, labels = batch(torch.float32)

    class Classifier(nn.Module):
        def __init__(self, rows: str) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.backbone = nn.Linear(DIM, DIM)
            cluster = None if rows == "ranks" else gt.local()
            self.head = gt.ClassHead(cluster, "c", num_classes=CLASSES, dim=DIM, rows=rows, optimizer=gt.SGD(0.1))

        def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
            loss: Tensor = self.head(self.backbone(inputs), labels)
            return loss

    net = gt.parallelize(Classifier("ranks"), gt.mesh(), {"backbone": gt.Replicate(), "head": gt.Split()})
    losses = []
    optimizer, rows = torch.optim.SGD(net.parameters(), 0.1), gt.RowOptimizer(net.module.head)
    for _ in range(3):
        loss = net(inputs[rank::ranks], labels[rank::ranks])
        loss.backward()
        optimizer.step()
        rows.step()
        losses.append(float(loss.detach()))
    assert losses[2] < losses[0]
    with pytest.raises(InvalidArgument, match="make it with rows='ranks'"):
        gt.parallelize(Classifier("pull"), gt.mesh(), {"backbone": gt.Replicate(), "head": gt.Split()})


def test_collectives_of_a_step_are_those_that_are_stated(tmp_path: Path) -> None:
    run_ranks(count, 2, tmp_path)
