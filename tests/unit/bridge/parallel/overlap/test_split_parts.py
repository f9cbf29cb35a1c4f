"""A split layer over micro-batches trains as it does over the whole batch, and fails on all ranks or on none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import geartrain as gt
from geartrain.ams.values.errors import InvalidArgument, InvalidIds, InvalidRows, SpecMismatch, SyncError
from tests.support.rank_processes import on_ranks
from tests.unit.bridge.parallel.test_parallelize import (
    CLASSES,
    DIM,
    FUSION,
    INSIDE,
    SHARDED,
    Classifier,
    assert_equal_training,
    made,
    own,
    samples,
)


class Scaled(Classifier):
    def forward(self, inputs: Tensor) -> Any:
        return torch.tanh(super().forward(inputs) / 2) * 1.5


class OfTokens(Classifier):
    """Two rows of features for each sample."""

    def forward(self, inputs: Tensor) -> Any:
        return super().forward(torch.stack([inputs, inputs.flip(1)], 1).flatten(0, 1))


@on_ranks(1, 2, 3)
def test_training_is_that_of_the_whole_batch(rank: int, ranks: int) -> None:
    _, labels, _ = samples(ranks)
    some = labels.clone()
    some[1:3] = 4
    for scopes in (FUSION, SHARDED, INSIDE):
        assert_equal_training(rank, ranks, made(Classifier), scopes, nn.CrossEntropyLoss(), micro_batches=3)
    for count in (2, 5):
        loss = nn.CrossEntropyLoss(ignore_index=4, label_smoothing=0.2)
        assert_equal_training(rank, ranks, made(Scaled), FUSION, loss, some, micro_batches=count)


@on_ranks(2)
def test_a_sample_may_have_several_rows_and_gradients_add_up(rank: int, ranks: int) -> None:
    inputs, labels, sizes = samples(ranks)
    mine, own_labels = own(inputs, sizes, rank), own(labels, sizes, rank).repeat_interleave(2)
    grads = []
    for count in (1, 2):
        model = made(OfTokens)
        parallel = gt.parallelize(model, gt.mesh(), FUSION, loss=nn.CrossEntropyLoss(), micro_batches=count)
        for _ in range(2):  # gradients add up
            with parallel.no_sync():
                parallel(mine, own_labels).backward()
        parallel({"inputs": mine}, own_labels).backward()
        grads.append([getattr(parameter.grad, "_local_tensor", parameter.grad) for parameter in model.parameters()])
    for item, other in zip(*grads, strict=True):
        torch.testing.assert_close(item, other)


@on_ranks(2)
def test_under_autocast_features_travel_in_16_bits(rank: int, ranks: int) -> None:
    inputs, labels, sizes = samples(ranks)
    mine, own_labels = own(inputs, sizes, rank).float(), own(labels, sizes, rank)
    found = []
    for count in (1, 3):
        model = made(Classifier).float()
        parallel = gt.parallelize(model, gt.mesh(), FUSION, loss=nn.CrossEntropyLoss(), micro_batches=count)
        with torch.autocast("cpu", torch.bfloat16):
            loss = parallel(mine, own_labels)
        loss.backward()
        found.append(
            [loss, *(getattr(parameter.grad, "_local_tensor", parameter.grad) for parameter in model.parameters())]
        )
        assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())  # type: ignore[union-attr]
    for item, other in zip(*found, strict=True):
        torch.testing.assert_close(item, other, rtol=2e-2, atol=2e-3)


class Fails(Classifier):
    """Does something else on rank 0, in one micro-batch."""

    def __init__(self, what: str, part: int, rank: int) -> None:
        super().__init__()
        self.what, self.part, self.rank, self.calls = what, part, rank, 0

    def forward(self, inputs: Tensor) -> Any:
        is_now = self.rank == 0 and self.calls % 3 == self.part
        self.calls += 1
        if is_now and self.what == "raises":
            raise ZeroDivisionError("in the backbone")
        features = self.backbone(inputs)
        if is_now and self.what == "narrow":
            features = features[:, 1:]
        if is_now and self.what == "fewer":
            features = features[1:]
        if is_now and self.what == "skips":
            return features
        logits = self.head(features)
        if is_now and self.what == "twice":
            logits = self.head(features)
        if is_now and self.what == "raises after":
            raise ZeroDivisionError("behind the head")
        return logits * 2 if is_now and self.what == "scales" else logits


@on_ranks(2)
def test_what_fails_on_a_rank_in_a_micro_batch_fails_on_all(rank: int, ranks: int) -> None:
    inputs, labels, sizes = samples(ranks)
    mine, own_labels = own(inputs, sizes, rank), own(labels, sizes, rank)
    failures: dict[str, tuple[Any, str]] = {
        "raises": (ZeroDivisionError, "in the backbone"),
        "raises after": (ZeroDivisionError, "behind the head"),
        "narrow": (InvalidRows, f"it takes features \\[S, {DIM}\\]"),
        "fewer": ((InvalidArgument, InvalidRows), "0 rows|labels and logits of 0|after the first one 0 of"),
        "skips": (InvalidArgument, "it returns the logits of its split layer 'head'"),
        "twice": (InvalidArgument, "'head' was called twice in a micro-batch"),
        "scales": (InvalidArgument, "with other numbers in each micro-batch"),
    }
    parallel = None
    for what, (error, message) in failures.items():
        for part in (0, 1, 2):
            if what == "scales" and part == 0:
                continue
            model = made(Fails, what, part, rank)
            parallel = gt.parallelize(model, gt.mesh(), FUSION, loss=nn.CrossEntropyLoss(), micro_batches=3)
            with pytest.raises(error if rank == 0 else SyncError, match=message if rank == 0 else "rank 0 failed"):
                parallel(mine, own_labels)
            model.what = "nothing"
            parallel(mine, own_labels).backward()  # the next step is sound
    assert parallel is not None
    bad: list[tuple[Any, Any, type[Exception], str]] = [
        (mine, own_labels + CLASSES, InvalidIds, "is no class"),
        (mine, own_labels[1:], InvalidArgument, "labels and logits of"),
        ("images", own_labels, InvalidArgument, "they hold a tensor"),
    ]
    for given, given_labels, kind, message in bad:
        with pytest.raises(kind if rank == 0 else SyncError, match=message if rank == 0 else "rank 0 failed"):
            parallel(given, given_labels) if rank == 0 else parallel(mine, own_labels)
    with pytest.raises(SpecMismatch, match="micro_batches is 1 on rank 0, 2 on rank 1"):
        gt.parallelize(made(Classifier), gt.mesh(), FUSION, loss=nn.CrossEntropyLoss(), micro_batches=rank + 1)


def test_micro_batches_of_what_cannot_come_in_parts_are_refused() -> None:
    loss = nn.CrossEntropyLoss()
    for scopes, given in (({"": gt.Replicate()}, loss), (FUSION, None), ({**FUSION, "backbone.0": gt.Split()}, loss)):
        with pytest.raises(InvalidArgument, match=r"micro_batches is 4; without stages it takes one split nn\.Linear"):
            gt.parallelize(Classifier(), gt.mesh(), scopes, loss=given, micro_batches=4)
    with pytest.raises(InvalidArgument, match="micro_batches is 0"):
        gt.parallelize(Classifier(), gt.mesh(), FUSION, loss=loss, micro_batches=0)
