"""A model in two stages: what a model in one piece computes, on senders and owners; and what they say of errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from geartrain.ams.values.errors import InvalidArgument, InvalidIds, RankLost, SpecMismatch, SyncError
from geartrain.bridge.parallel.mesh import mesh
from geartrain.bridge.parallel.parallelize import parallelize
from geartrain.bridge.parallel.scopes import Replicate, Split
from geartrain.bridge.parallel.staged.staged_model import StagedModel
from tests.support.rank_processes import on_ranks, run_ranks

DIM, CLASSES = 5, 11
SCOPES = {"backbone": Replicate(), "head": Split()}


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, DIM), nn.Tanh())
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, inputs: Tensor) -> Any:
        return self.head(self.backbone(inputs))


class Scaled(Classifier):
    def forward(self, inputs: Tensor) -> Any:
        return super().forward(inputs) * 2


def made(kind: Callable[[], nn.Module] = Classifier) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def batches(sizes: list[int], step: int) -> list[tuple[Tensor, Tensor]]:
    """Samples of each sender; of the labels some do not count."""
    generator = torch.Generator().manual_seed(step)
    total = sum(sizes)
    inputs = torch.randn(total, 4, dtype=torch.float64, generator=generator)
    labels = torch.randint(CLASSES, (total,), generator=generator)
    labels[1::4] = -100
    return list(zip(inputs.split(sizes), labels.split(sizes), strict=True))


def criterion() -> nn.CrossEntropyLoss:
    weight = torch.linspace(0.5, 2.0, CLASSES, dtype=torch.float64)
    return nn.CrossEntropyLoss(weight, label_smoothing=0.1)


def own_samples(model: StagedModel, sizes: list[int], step: int) -> tuple[Any, Any]:
    stages, rank = model.mesh.stages, model.mesh.rank
    return batches(sizes, step)[stages[0].index(rank)] if rank in stages[0] else (None, None)


def train_as_one(rank: int, stages: list[list[int]], sizes: list[int], is_sharded: bool) -> None:
    """Two steps of accumulated batches, then logits, beside the same model in one piece."""
    scopes = {**SCOPES, "backbone": Replicate(shard=is_sharded)}
    model = parallelize(made(), mesh(stages), scopes, loss=criterion())
    assert isinstance(model, StagedModel)
    whole, loss_of = made(), criterion()
    optimizers = [torch.optim.SGD(item.parameters(), lr=0.5, momentum=0.9) for item in (model, whole)]
    for step in range(2):
        for part in range(2):
            seed = 2 * step + part
            with model.no_sync() if part == 0 else torch.enable_grad():
                loss = model(*own_samples(model, sizes, seed))
                (loss / 2).backward()
            inputs, labels = (torch.cat(item) for item in zip(*batches(sizes, seed), strict=True))
            expected = loss_of(whole(inputs), labels)
            (expected / 2).backward()
            torch.testing.assert_close(loss, expected.detach(), check_dtype=False)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    own = dict(model.state_dict())
    expected_state = whole.state_dict()
    first = "backbone" if rank in stages[0] else "head"
    assert sorted(own) == sorted(name for name in expected_state if name.startswith(first))
    for name, value in own.items():
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        torch.testing.assert_close(value, expected_state[name])
    model.eval()
    inputs, _ = own_samples(model, sizes, 9)
    logits = model(inputs)
    if inputs is None:
        assert logits is None
    else:
        torch.testing.assert_close(logits, whole(inputs).detach())


@pytest.mark.parametrize(
    ("stages", "sizes", "is_sharded"),
    [([[0, 1], [2]], [3, 2], True), ([[2], [0, 1]], [5], False), ([[3, 1], [0, 2]], [1, 0], False)],
)
def test_values_and_gradients_are_those_of_a_model_in_one_piece(
    tmp_path: Path, stages: list[list[int]], sizes: list[int], is_sharded: bool
) -> None:
    run_ranks(train_as_one, sum(map(len, stages)), tmp_path, stages, sizes, is_sharded)


def staged(kind: Callable[[], nn.Module] = Classifier, stages: tuple[tuple[int, ...], ...] = ((0, 1), (2,))) -> Any:
    return parallelize(made(kind), mesh(stages), SCOPES, loss=nn.CrossEntropyLoss())


def raises(is_culprit: bool, error: type[Exception], said: str, elsewhere: str) -> Any:
    """Of a culprit ``error``, of the others SyncError."""
    return pytest.raises(error, match=said) if is_culprit else pytest.raises(SyncError, match=elsewhere)


@on_ranks(3)
def test_a_mistake_of_one_rank_is_an_error_on_every_rank(rank: int) -> None:
    """Whoever made the mistake hears of it, the others hear who it was; then a step succeeds."""
    model = staged()
    inputs, labels = own_samples(model, [2, 3], 0)
    cases: list[tuple[int, type[Exception], Any, Any]] = [
        (1, InvalidIds, inputs, None if labels is None else labels + CLASSES),
        (0, InvalidArgument, inputs, None if labels is None else labels[1:]),
        (0, RuntimeError, None if inputs is None else inputs[:, 1:], labels),
        (1, InvalidArgument, inputs, None),
        (2, InvalidArgument, torch.ones(1, 4), torch.ones(1)),
    ]
    for culprit, error, wrong_inputs, wrong_labels in cases:
        arguments = (wrong_inputs, wrong_labels) if rank == culprit else (inputs, labels)
        with raises(rank == culprit, error, "", f"rank {culprit}"):
            model(*arguments)
    with pytest.raises(SpecMismatch, match=r"torch.no_grad"), torch.set_grad_enabled(rank != 1):
        model(inputs, labels)
    model.loss = nn.CrossEntropyLoss(torch.ones(3)) if rank == 2 else model.loss
    with raises(rank == 2, InvalidArgument, "weight has shape", "rank 2"):
        model(inputs, labels)
    scaled = staged(Scaled)
    with raises(rank < 2, InvalidArgument, "an operator is not", "failed"):
        scaled(inputs, labels)
    model.loss = nn.CrossEntropyLoss()
    model(inputs, labels).backward()


@on_ranks(3)
def test_what_cannot_be_staged_is_refused_by_name_and_each_stage_makes_its_part(rank: int) -> None:
    """What cannot be; then a model on the meta device, of which no rank makes the other stage's part."""
    two, loss = mesh([[0], [1, 2]]), nn.CrossEntropyLoss()
    for on, scopes, named in (
        (mesh([[0], [1], [2]]), SCOPES, "3 stages"),
        (two, {"": Replicate()}, "one nn.Linear is split, and these are: none"),
        (two, {"backbone.0": Split(), "head": Split()}, "backbone.0"),
    ):
        with pytest.raises(InvalidArgument, match=named):
            parallelize(made(), on, scopes, loss=loss)
    with pytest.raises(InvalidArgument, match="give loss="):
        parallelize(made(), two, SCOPES)
    with torch.device("meta"):
        blank = Classifier()
    model = parallelize(blank, two, SCOPES, loss=loss)
    held = {name.partition(".")[0] for name, _ in model.module.named_parameters()}
    assert held == ({"head"} if rank else {"backbone"})
    assert torch.isfinite(model(torch.ones(2, 4), torch.ones(2).long()) if rank == 0 else model(None, None))


def die_before_the_step(rank: int, victim: int) -> None:
    model = staged()
    inputs, labels = own_samples(model, [2, 3], 0)
    model(inputs, labels).backward()
    if rank == victim:
        return
    with pytest.raises(RankLost):
        model(inputs, labels).backward()


@on_ranks(3)
def test_an_owner_that_dies_before_the_backward_pass_is_a_typed_error(rank: int) -> None:
    model = staged()
    loss = model(*own_samples(model, [2, 3], 0))
    if rank == 2:
        return
    with pytest.raises(RankLost):
        loss.backward()


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_dies_is_a_typed_error_on_the_others(tmp_path: Path, victim: int) -> None:
    run_ranks(die_before_the_step, 3, tmp_path, victim)
