"""The head's maths as plain functions: the formula, its gradient, and classes that are spread over ranks."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import geartrain as gt
from geartrain.ams.values.errors import InvalidArgument, InvalidIds, InvalidRows
from geartrain.bridge.collectives.communicator import Communicator
from geartrain.bridge.collectives.cross_entropy import LocalLabels, split_cross_entropy
from geartrain.bridge.head.loss import functional
from tests.support.no_answers import NoAnswers
from tests.support.rank_processes import on_ranks

MARGINS = {
    "arcface": (1.0, 0.5, 0.0),
    "cosface": (1.0, 0.0, 0.35),
    "sphereface": (1.35, 0.0, 0.0),
    "all": (1.1, 0.2, 0.1),
}
SCALE = 12.0
CLASSES = 11
BOUNDS = (0, 3, 11)
"""Of the classes of two ranks."""


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines [7, 11] float64 and labels [7]; class 10 and class 0 among them."""
    generator = torch.Generator().manual_seed(seed)
    cosines = torch.rand(7, CLASSES, generator=generator, dtype=torch.float64) * 1.9 - 0.95
    return cosines, torch.tensor([0, 10, 3, 3, 2, 7, 5])


def plain(
    cosines: torch.Tensor, labels: torch.Tensor, m1: float, m2: float, m3: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses [B] and logits of the targets [B], written out sample by sample."""
    losses, targets = [], []
    for row, label in zip(cosines, labels.tolist(), strict=True):
        angle = m1 * torch.acos(row[label]) + m2
        k = math.floor(float(angle.detach()) / math.pi)
        target = (-1) ** k * torch.cos(angle) - 2 * k - m3
        logits = SCALE * torch.cat([row[:label], target[None], row[label + 1 :]])
        losses.append(torch.logsumexp(logits, 0) - logits[label])
        targets.append(logits[label])
    return torch.stack(losses), torch.stack(targets)


@pytest.mark.parametrize("margins", MARGINS.values(), ids=MARGINS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_loss_and_gradient_are_those_of_the_formula(margins: tuple[float, float, float], reduction: Any) -> None:
    cosines, labels = batch()
    ours, theirs = cosines.clone().requires_grad_(), cosines.clone().requires_grad_()
    found = gt.margin_cross_entropy(ours, labels, *margins, SCALE, reduction=reduction)
    losses, _ = plain(theirs, labels, *margins)
    expected = losses if reduction == "none" else getattr(losses, reduction)()
    torch.testing.assert_close(found, expected)
    weights = torch.arange(1.0, 8.0, dtype=torch.float64) if reduction == "none" else torch.tensor(2.0)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_weights_ignored_and_smoothed_labels_are_those_of_torch(reduction: Any) -> None:
    cosines, labels = batch()
    labels[2] = -100
    weight = torch.arange(len(labels), dtype=torch.float64)
    ours, theirs = cosines.clone().requires_grad_(), cosines.clone().requires_grad_()
    found = gt.margin_cross_entropy(
        ours, labels, 1.0, 0.0, 0.0, SCALE, weight=weight, reduction=reduction, label_smoothing=0.2
    )
    losses = weight * F.cross_entropy(theirs * SCALE, labels, label_smoothing=0.2, reduction="none")
    expected = {"none": losses, "sum": losses.sum(), "mean": losses.sum() / (weight.sum() - 2)}[reduction]
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)
    nothing = gt.margin_cross_entropy(ours, torch.full_like(labels, -100))
    assert float(nothing.detach()) == 0.0
    with pytest.raises(InvalidArgument, match=r"weight -1.0 at index 0"):
        gt.margin_cross_entropy(ours, labels, weight=weight - 1)


@pytest.mark.parametrize("size", [1e39, 3e38, 1e-46])
def test_a_mean_is_weighted_whatever_the_size_of_the_weights(size: float) -> None:
    cosines, labels = batch()
    weight = torch.arange(len(labels), dtype=torch.float64).requires_grad_()
    expected = gt.margin_cross_entropy(cosines.float(), labels, weight=weight)
    huge = (weight.detach() * size).requires_grad_()
    found = gt.margin_cross_entropy(cosines.float(), labels, weight=huge)
    torch.testing.assert_close(found, expected)
    by_huge, by_weight = torch.autograd.grad(found, huge)[0] * size, torch.autograd.grad(expected, weight)[0]
    torch.testing.assert_close(by_huge, by_weight, rtol=1e-4, atol=1e-5)
    ignored, labels[0] = huge.detach().index_fill(0, torch.tensor(0), 1e300), -100
    torch.testing.assert_close(gt.margin_cross_entropy(cosines.float(), labels, weight=ignored), expected)


def test_weights_may_all_be_subnormal() -> None:
    cosines, labels = batch()
    weight, found = torch.arange(len(labels), dtype=torch.float64), []
    for size in (1.0, 1e-310):
        ours = cosines.clone().requires_grad_()
        loss = gt.margin_cross_entropy(ours, labels, weight=weight * size)
        found.append((loss.detach(), *torch.autograd.grad(loss, ours)))
    torch.testing.assert_close(found[1], found[0])


def test_the_gradient_is_that_of_the_loss() -> None:
    cosines, labels = batch(1)
    assert torch.autograd.gradcheck(
        lambda x: gt.margin_cross_entropy(x, labels, 1.1, 0.2, 0.1, SCALE, label_smoothing=0.1),
        (cosines.requires_grad_(),),
    )


def test_16_bit_logits_are_computed_in_float32() -> None:
    cosines, labels = batch()
    narrow = cosines.to(torch.bfloat16).requires_grad_()
    loss = gt.margin_cross_entropy(narrow, labels, *MARGINS["all"], SCALE)
    wide = gt.margin_cross_entropy(narrow.detach().double(), labels, *MARGINS["all"], SCALE)
    assert loss.dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(float(wide), rel=1e-6)
    loss.backward()
    assert narrow.grad is not None
    assert narrow.grad.dtype == torch.bfloat16


class _Matrices(TorchDispatchMode):
    """Notes how many matrices of so many numbers that operations have made are alive at once, at most."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self._numbers = numbers
        self._seen: list[StorageWeakRef] = []
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.numel() >= self._numbers:
            self._seen.append(StorageWeakRef(out.untyped_storage()))
            self.most = max(self.most, len({storage.cdata for storage in self._seen if not storage.expired()}))
        return out


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_memory_is_one_matrix_beside_the_logits_and_two_in_the_backward_pass(smoothing: float) -> None:
    rows, classes = 64, 20_000  # chunks of a pass are smaller
    cosines = (torch.rand(rows, classes) * 1.9 - 0.95).requires_grad_()
    with _Matrices(cosines.numel()) as forward:
        loss = gt.margin_cross_entropy(cosines, torch.arange(rows), scale=SCALE, label_smoothing=smoothing)
    with _Matrices(cosines.numel()) as backward:
        loss.backward()
    # In the backward pass the logits were made before: what is new is their gradient.
    assert (forward.most, backward.most) == (1, 1)


def test_a_label_that_nobody_could_look_at_poisons_its_sample_alone() -> None:
    cosines, labels = batch()
    labels[2] = CLASSES  # as on a GPU, where looking would stall
    cosines.requires_grad_()
    ones = torch.ones(len(labels), dtype=torch.float64)
    losses = split_cross_entropy(cosines, LocalLabels(places_B=labels, counts_B=ones.bool(), weights_B=ones), None)
    losses.sum().backward()
    assert cosines.grad is not None
    for found in (losses, cosines.grad[:, 0]):
        assert found.isnan().tolist() == [False, False, True, False, False, False, False]


def test_samples_are_the_positives_and_the_classes_of_partial_fc() -> None:
    labels = torch.tensor([900, 5, 5, 17])
    remapped, sampled = gt.class_center_sample(labels, 1000, 50, seed=3, step=8)
    assert sampled[remapped].tolist() == labels.tolist()
    active = gt.PartialFC(0.05, seed=3).select(labels.numpy(), 1000, 8)
    assert sampled.tolist() == active.ids.tolist()
    assert len(sampled) == 50


@pytest.mark.parametrize(("num_samples", "found"), [(1, 3), (2000, 1000)])
def test_positives_are_all_kept_and_there_are_no_more_classes_than_all(num_samples: int, found: int) -> None:
    remapped, sampled = gt.class_center_sample(torch.tensor([900, 5, 17]), 1000, num_samples, seed=0, step=0)
    assert len(sampled) == found
    assert sampled[remapped].tolist() == [900, 5, 17]


@pytest.mark.parametrize("num_samples", [1, 3, 50, 999, 2000])
def test_a_device_samples_what_the_host_samples(num_samples: int) -> None:
    labels = torch.tensor([900, 5, 5, 17])
    expected = gt.class_center_sample(labels, 1000, num_samples, seed=2**64 - 1, step=8)
    given = torch.tensor([900, 5, 1000, 5, -1, 17])
    with NoAnswers() if num_samples >= len(given) else contextlib.nullcontext():
        remapped, sampled = functional._sample_on_device(given, 1000, num_samples, 2**64 - 1, 8, None)
    assert sampled.tolist() == expected[1].tolist()
    assert remapped[[0, 1, 3, 5]].tolist() == expected[0].tolist() and remapped[[2, 4]].tolist() == [-1, -1]


@on_ranks(1, 2, 3)
def test_classes_on_several_ranks_are_one_layer(rank: int, ranks: int) -> None:
    cosines, labels = batch()
    labels[2] = -100
    bounds = [0, 3, 7, CLASSES] if ranks == 3 else [0, *([3] if ranks == 2 else []), CLASSES]
    here = slice(bounds[rank], bounds[rank + 1])
    link = Communicator()
    weight_C = torch.linspace(0.0, 2.0, CLASSES, dtype=torch.float64)
    upstream_B = torch.linspace(-1.0, 2.0, len(labels), dtype=torch.float64)
    for smoothing in (0.0, 0.2):
        for weights in (None, weight_C):
            whole = (cosines * SCALE).requires_grad_()
            expected = F.cross_entropy(whole, labels, weights, reduction="none", label_smoothing=smoothing)
            (expected * upstream_B).sum().backward()
            own = (cosines * SCALE)[:, here].requires_grad_()
            counts = labels != -100
            given = LocalLabels(
                places_B=labels - here.start,
                counts_B=counts,
                weights_B=counts.double() if weights is None else counts * weight_C[labels.clamp(0)],
                smoothing=smoothing,
                num_classes=CLASSES,
                weight_L=None if weights is None else weight_C[here],
                total_weight=float(CLASSES) if weights is None else weight_C.sum(),
            )
            found = split_cross_entropy(own, given, link)
            (found * upstream_B).sum().backward()
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(own.grad, whole.grad[:, here], rtol=1e-12, atol=1e-12)  # type: ignore[index]
        whole = cosines.clone().requires_grad_()
        kept = labels != -100
        losses, targets = plain(whole[kept], labels[kept], *MARGINS["all"])
        expected = (losses + smoothing * (targets - SCALE * whole[kept].mean(1))).mean()
        expected.backward()
        own = cosines[:, here].clone().requires_grad_()
        group = dist.group.WORLD
        loss = gt.margin_cross_entropy(own, labels, *MARGINS["all"], SCALE, group, label_smoothing=smoothing)
        loss.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(own.grad, whole.grad[:, here], rtol=1e-9, atol=1e-12)  # type: ignore[index]
    with pytest.raises(InvalidIds, match=r"label 11 at index 1 is outside \[0, 11\)"):
        gt.margin_cross_entropy(own, labels + 1, ignore_index=-99, group=group)


@on_ranks(2)
def test_classes_of_two_ranks_are_sampled_together(rank: int, ranks: int) -> None:
    labels, width = batch()[1], BOUNDS[rank + 1] - BOUNDS[rank]
    remapped, sampled = gt.class_center_sample(labels, width, 3, seed=1, step=2, group=dist.group.WORLD)
    joint = [None] * ranks
    dist.all_gather_object(joint, sampled + BOUNDS[rank])
    assert torch.cat(joint)[remapped].tolist() == labels.tolist()  # type: ignore[arg-type]
    assert len(sampled) == (3, 4)[rank]  # of the first rank all, of the second four positives
    on_device = functional._sample_on_device(labels, width, 3, 1 + rank, 2, Communicator())
    assert on_device[0].tolist() == remapped.tolist() and on_device[1].tolist() == sampled.tolist()


@pytest.mark.parametrize(
    ("logits", "labels", "error", "message"),
    [
        (torch.zeros(2, 3), torch.tensor([0, 3]), InvalidIds, r"label 3 at index 1 is outside \[0, 3\)"),
        (torch.zeros(2, 3), torch.tensor([-1, 0]), InvalidIds, "label -1 at index 0"),
        (torch.zeros(2, 3), torch.tensor([0]), InvalidIds, r"int64 \[1\]; they must be a torch.int64 tensor \[2\]"),
        (torch.zeros(2, 3), torch.tensor([0.0, 1.0]), InvalidIds, "float32"),
        (torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64), InvalidRows, r"\[0, 3\]"),
        (torch.zeros(3), torch.tensor([0]), InvalidRows, r"\[3\]"),
        (torch.zeros(1, 3, dtype=torch.int64), torch.tensor([0]), InvalidRows, "int64"),
    ],
)
def test_what_cannot_be_is_refused(logits: Any, labels: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        gt.margin_cross_entropy(logits, labels)


def test_settings_out_of_range_are_refused() -> None:
    cosines, labels = batch()
    with pytest.raises(InvalidArgument, match="reduction is 'max'"):
        gt.margin_cross_entropy(cosines, labels, reduction="max")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="scale is -1"):
        gt.margin_cross_entropy(cosines, labels, scale=-1)
    with pytest.raises(InvalidArgument, match="num_samples is 0"):
        gt.class_center_sample(labels, CLASSES, 0, seed=0, step=0)
    with pytest.raises(InvalidIds, match="label 10 at index 1 is outside"):
        gt.class_center_sample(labels, 10, 5, seed=0, step=0)
