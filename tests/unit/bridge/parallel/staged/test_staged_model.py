"""A model in stages: what a model in one piece computes, on the ranks of each; and what they say of errors."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from geartrain.ams.values.errors import InvalidArgument, InvalidIds, InvalidRows, RankLost, SpecMismatch, SyncError
from geartrain.bridge.parallel.mesh import mesh
from geartrain.bridge.parallel.parallelize import parallelize
from geartrain.bridge.parallel.scopes import Replicate, Scope, Split
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


class Deep(nn.Module):
    """Layers whose outputs are maps, pooled and flat."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 1), nn.Tanh())
        self.neck = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 7), nn.Tanh())
        self.mid = nn.Linear(7, DIM)
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, inputs: Tensor) -> Any:
        return self.head(self.mid(self.neck(self.body(inputs))))


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ids = nn.Embedding(9, DIM)
        self.mid = nn.Sequential(nn.ReLU(), nn.Linear(DIM, DIM))
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, inputs: Tensor) -> Any:
        pooled = self.ids((4 * inputs).abs().long().clamp(max=8)).mean(1)
        return self.head(self.mid(pooled))


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


def train_as_one(
    stages: list[list[int]],
    sizes: list[int],
    kind: Callable[[], nn.Module],
    scopes: dict[str, Scope],
    firsts: list[tuple[str, ...]],
    micro_batches: int,
) -> None:
    """Two steps of accumulated batches, then logits, beside the same model in one piece; ``firsts`` of each stage."""
    model = parallelize(made(kind), mesh(stages), scopes, loss=criterion(), micro_batches=micro_batches)
    assert isinstance(model, StagedModel)
    whole, loss_of = made(kind), criterion()
    optimizers = [torch.optim.SGD(item.parameters(), lr=0.5, momentum=0.9) for item in (model, whole)]
    exactly = {"rtol": 1e-12, "atol": 1e-14}
    for step in range(2):
        for part in range(2):
            seed = 2 * step + part
            with model.no_sync() if part == 0 else torch.enable_grad():
                loss = model(*own_samples(model, sizes, seed))
                (loss / 2).backward()
            inputs, labels = (torch.cat(item) for item in zip(*batches(sizes, seed), strict=True))
            expected = loss_of(whole(inputs), labels)
            (expected / 2).backward()
            torch.testing.assert_close(loss, expected.detach(), check_dtype=False, **exactly)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    own = dict(model.state_dict())
    expected_state = whole.state_dict()
    own_stage = model.mesh.own_stage
    assert own_stage is not None
    assert sorted(own) == sorted(name for name in expected_state if name.startswith(firsts[own_stage]))
    for name, value in own.items():
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        torch.testing.assert_close(value, expected_state[name], **exactly)
    model.eval()
    inputs, _ = own_samples(model, sizes, 9)
    logits = model(inputs)
    if inputs is None:
        assert logits is None
    else:
        torch.testing.assert_close(logits, whole(inputs).detach(), **exactly)


@pytest.mark.parametrize(
    ("stages", "sizes", "is_sharded"),
    [([[0, 1], [2]], [3, 2], True), ([[2], [0, 1]], [5], False), ([[3, 1], [0, 2]], [1, 0], False)],
)
def test_values_and_gradients_are_those_of_a_model_in_one_piece(
    tmp_path: Path, stages: list[list[int]], sizes: list[int], is_sharded: bool
) -> None:
    scopes = {**SCOPES, "backbone": Replicate(shard=is_sharded)}
    ranks = sum(map(len, stages))
    run_ranks(train_as_one, ranks, tmp_path, stages, sizes, Classifier, scopes, [("backbone",), ("head",)], 1)


THREE: dict[str, Scope] = {
    "body": Replicate(),
    "neck": Replicate(stage=1),
    "mid": Split(stage=1),
    "head": Split(),
}
POOLED: dict[str, Scope] = {"ids": Split(stage=0), "mid": Replicate(stage=1), "head": Replicate(stage=2)}


@pytest.mark.parametrize(
    ("stages", "sizes", "scopes", "micro_batches"),
    [
        ([[0, 3], [1], [2]], [2, 3], POOLED, 2),
        ([[0, 3], [2], [1]], [5, 3], THREE, 3),
        ([[1], [0, 3], [2]], [6], {**THREE, "neck": Replicate(shard=True, stage=1)}, 2),
        ([[1], [2], [3, 0]], [3], {**THREE, "mid": Replicate(stage=1), "head": Replicate(stage=2)}, 4),
    ],
)
def test_three_stages_are_a_model_in_one_piece_however_they_are_held_and_batches_divided(
    tmp_path: Path, stages: list[list[int]], sizes: list[int], scopes: dict[str, Scope], micro_batches: int
) -> None:
    kind, firsts = Deep, [("body",), ("neck", "mid"), ("head",)]
    if scopes is POOLED:
        kind, firsts = Pooled, [("ids",), ("mid",), ("head",)]
    run_ranks(train_as_one, 4, tmp_path, stages, sizes, kind, scopes, firsts, micro_batches)


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


@on_ranks(2)
def test_labels_of_a_loss_of_ones_own_need_not_be_classes(rank: int) -> None:
    def hinge(outputs: Tensor, labels: Tensor) -> Tensor:
        return torch.relu(1 - outputs.squeeze(1) * labels).mean()

    model = made(Classifier)
    model.head = nn.Linear(DIM, 1).double()
    plain = copy.deepcopy(model)
    scopes = {"backbone": Replicate(), "head": Replicate(stage=1)}
    net = parallelize(model, mesh([[0], [1]]), scopes, loss=hinge)
    inputs, labels = torch.randn(5, 4, dtype=torch.float64), torch.tensor([1, -1, -1, 1, 1])
    loss = net(inputs, labels) if rank == 0 else net(None, None)
    if rank == 0:
        torch.testing.assert_close(loss.detach(), hinge(plain(inputs), labels).detach())


class Normed(Deep):
    """A layer in each stage has statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.body.append(nn.BatchNorm2d(3))
        self.head = nn.Sequential(nn.BatchNorm1d(DIM), nn.Linear(DIM, CLASSES))  # type: ignore[assignment]


@on_ranks(4)
def test_ranks_of_a_stage_evaluate_with_the_statistics_of_its_first() -> None:
    scopes = {"body": Replicate(), "neck": Replicate(), "mid": Replicate(stage=1), "head": Replicate(stage=1)}
    model = parallelize(made(Normed), mesh([[0, 1], [2, 3]]), scopes, loss=criterion())
    model(*own_samples(model, [5, 6], 0)).backward()
    found = [value.clone() for value in model.module.buffers()]
    for value in found:
        model.mesh.stage.link.broadcast_from_first(value)
    model.eval()
    model(own_samples(model, [5, 6], 1)[0])
    assert found
    for value, expected in zip(model.module.buffers(), found, strict=True):
        torch.testing.assert_close(value, expected)


def failing(module: nn.Module, at_call: int) -> Any:
    """Let ``module`` fail in a forward pass from now on; a handle to remove that."""
    calls = iter(range(at_call + 1))

    def count(*_: Any) -> None:
        if next(calls) == at_call:
            raise ValueError("out of order")

    return module.register_forward_pre_hook(count)


@on_ranks(4)
def test_a_failure_in_any_micro_batch_of_any_of_three_stages_is_an_error_on_every_rank(rank: int) -> None:
    model = parallelize(made(Deep), mesh([[0], [1, 2], [3]]), THREE, loss=nn.CrossEntropyLoss(), micro_batches=3)
    inputs, labels = own_samples(model, [6], 0)
    for culprit, layer in ((0, "body"), (1, "neck"), (2, "mid"), (3, "head")):
        handle = failing(model.module.get_submodule(layer), 0 if culprit == 3 else 1) if rank == culprit else None
        with raises(rank == culprit, ValueError, "out of order", "failed; its error tells why"):  # type: ignore[arg-type]
            model(inputs, labels)
        if handle is not None:
            handle.remove()
    wrong = None if labels is None else labels.clone().fill_(CLASSES)
    with raises(rank == 0, InvalidIds, "11 is no class", "rank 0 failed"):
        model(inputs, wrong)
    model(inputs, labels).backward()


def wait_for(path: Path) -> None:
    for _ in range(400):
        if path.exists():
            return
        time.sleep(0.05)
    raise TimeoutError(path.name)


@on_ranks(3)
def test_a_stage_works_on_a_micro_batch_while_the_one_before_works_on_the_next(rank: int, folder: Path) -> None:
    """Each stage ends the first micro-batch only when the stage before has begun the second."""
    scopes = {**THREE, "mid": Replicate(stage=1)}
    model = parallelize(made(Deep), mesh([[0], [1], [2]]), scopes, loss=nn.CrossEntropyLoss(), micro_batches=2)
    passes = iter(range(1, 3))

    def meet(*_: Any) -> None:
        if next(passes) == 2:
            (folder / f"second-{rank}").touch()
        elif rank:
            wait_for(folder / f"second-{rank - 1}")

    if rank < 2:
        model.module.get_submodule(("body", "neck")[rank]).register_forward_pre_hook(meet)
    model(*own_samples(model, [4], 0)).backward()


@on_ranks(3)
def test_what_cannot_be_staged_is_refused_by_name_and_each_stage_makes_its_part(rank: int) -> None:
    """What cannot be; then a model on the meta device, of which no rank makes the other stage's part."""
    two, three, loss = mesh([[0], [1, 2]]), mesh([[0], [1], [2]]), nn.CrossEntropyLoss()
    for on, scopes, named in (
        (three, {**THREE, "neck": Replicate(), "mid": Replicate()}, r"stage 1 \(ranks \[1\]\) has no layer"),
        (two, {"": Replicate()}, r"stage 1 \(ranks \[1, 2\]\) has no layer.*gt\.Replicate\(stage=1\)"),
        (two, {**THREE, "head": Split(stage=2)}, "'head' has stage=2, and the mesh has stages 0 to 1"),
        (three, {**THREE, "neck.2": Split()}, "'neck.2' lies inside 'neck', which is of stage 1"),
    ):
        with pytest.raises(InvalidArgument, match=named):
            parallelize(made(Deep), on, scopes, loss=loss)
    tied = Deep()
    tied.mid = nn.Linear(7, 7)
    tied.neck[2].bias = tied.mid.bias
    with pytest.raises(InvalidArgument, match=r"'neck.2.bias' and 'mid.bias' are one, in stages 1 and 2"):
        parallelize(tied, three, {**THREE, "mid": Replicate(stage=2)}, loss=loss)
    with pytest.raises(InvalidArgument, match="stage is -1"):
        Replicate(stage=-1)
    with pytest.raises(InvalidArgument, match=r"'ids' is an nn\.Embedding.*gt\.Split\(stage=0\)"):
        parallelize(nn.ModuleDict({"ids": nn.Embedding(3, 2)}), two, {"ids": Split()}, loss=loss)
    with pytest.raises(InvalidArgument, match="give loss="):
        parallelize(made(), two, SCOPES)
    unshaped = nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4), nn.Linear(4, 4))
    model = parallelize(unshaped, three, {str(n): Replicate(stage=n) for n in range(3)}, loss=loss)
    with raises(rank == 1, InvalidRows, r"output of stage 1 is tuple; .* Pool or flatten", "rank 1 failed"):
        model(*((torch.ones(2, 4), torch.ones(2).long()) if rank == 0 else (None, None)))
    model = parallelize(made(Deep), two, {"body": Replicate(), "mid": Split(), "neck": Replicate(stage=1),
                                         "head": Split()}, loss=loss)  # fmt: skip
    with raises(rank == 0, InvalidArgument, r"in the order of the calls", "rank 0 failed"):
        model(*((torch.ones(2, 4).double(), torch.ones(2).long()) if rank == 0 else (None, None)))
    with torch.device("meta"):
        blank = Classifier()
    model = parallelize(blank, two, SCOPES, loss=loss)
    held = {name.partition(".")[0] for name, _ in model.module.named_parameters()}
    assert held == ({"head"} if rank else {"backbone"})
    assert torch.isfinite(model(torch.ones(2, 4), torch.ones(2).long()) if rank == 0 else model(None, None))


def die_before_the_step(rank: int, victim: int, three: bool) -> None:
    scopes = {**THREE, "mid": Replicate(stage=1)}
    on, loss = mesh([[0], [1], [2]]), nn.CrossEntropyLoss()
    model = parallelize(made(Deep), on, scopes, loss=loss, micro_batches=2) if three else staged()
    inputs, labels = own_samples(model, [5] if three else [2, 3], 0)
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


@pytest.mark.parametrize(("victim", "three"), [(0, False), (2, False), (1, True)])
def test_a_rank_that_dies_is_a_typed_error_on_the_others(tmp_path: Path, victim: int, three: bool) -> None:
    run_ranks(die_before_the_step, 3, tmp_path, victim, three)
