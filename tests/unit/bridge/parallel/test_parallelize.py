"""A parallel model gives the values and gradients of the model that is not, on any number of ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import geartrain as gt
from geartrain.ams.values.errors import InvalidArgument, InvalidIds, SpecMismatch, SyncError
from geartrain.bridge.parallel.global_mean import own_sum_of
from geartrain.bridge.parallel.scopes import Scope
from tests.support.rank_processes import on_ranks

CLASSES, DIM, INPUTS = 10, 6, 5
SIZES = {1: [7], 2: [3, 4], 3: [4, 0, 3]}
FUSION: dict[str, Scope] = {"backbone": gt.Replicate(), "head": gt.Split()}
SHARDED: dict[str, Scope] = {"backbone": gt.Replicate(shard=True), "head": gt.Split()}
DATA_PARALLEL: dict[str, Scope] = {"": gt.Replicate()}
INSIDE: dict[str, Scope] = {"": gt.Replicate(), "head": gt.Split()}


class Classifier(nn.Module):
    def __init__(self, classes: int = CLASSES, *, bias: bool = True) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(INPUTS, 8), nn.Tanh(), nn.Linear(8, DIM))
        self.head = nn.Linear(DIM, classes, bias=bias)

    def forward(self, inputs: Tensor) -> Any:
        return self.head(self.backbone(inputs))


class WithWords(nn.Module):
    """Words, some of which pad, are looked up, averaged and classified."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(13, DIM, padding_idx=3)
        self.middle = nn.Linear(DIM, DIM)
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, ids: Tensor) -> Any:
        return self.head(torch.tanh(self.middle(self.words(ids).mean(1))))


def made(model: Callable[..., nn.Module], *arguments: Any, **options: Any) -> nn.Module:
    torch.manual_seed(3)
    return model(*arguments, **options).double()


def samples(ranks: int, *, ids: bool = False) -> tuple[Tensor, Tensor, list[int]]:
    torch.manual_seed(5)
    sizes = SIZES[ranks]
    num = sum(sizes)
    inputs = torch.randint(0, 13, (num, 4)) if ids else torch.randn(num, INPUTS, dtype=torch.float64)
    return inputs, torch.randint(0, CLASSES, (num,)), sizes


def own(tensor: Tensor, sizes: list[int], rank: int) -> Tensor:
    return torch.split(tensor, sizes)[rank]


def own_samples(rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    inputs, labels, sizes = samples(ranks)
    return own(inputs, sizes, rank), own(labels, sizes, rank)


def whole(tensor: Tensor | None) -> Tensor | None:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[union-attr]


def assert_equal_training(
    rank: int,
    ranks: int,
    model: nn.Module,
    scopes: dict[str, Scope],
    loss: nn.Module,
    labels: Tensor | None = None,
    *,
    ids: bool = False,
    micro_batches: int = 1,
) -> gt.bridge.parallel.parallel_model.ParallelModel:  # type: ignore[name-defined]
    """Two steps with momentum; the loss, gradients and parameters are those of ``model`` and the joint batch."""
    inputs, drawn, sizes = samples(ranks, ids=ids)
    labels = drawn if labels is None else labels
    plain = copy.deepcopy(model)
    parallel = gt.parallelize(model, gt.mesh(), scopes, loss=loss, micro_batches=micro_batches)
    optimizers = [torch.optim.SGD(item.parameters(), lr=0.5, momentum=0.9) for item in (plain, parallel)]
    for _ in range(2):
        expected = loss(plain(inputs), labels)
        given = parallel(own(inputs, sizes, rank), own(labels, sizes, rank))
        torch.testing.assert_close(given, expected)
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected.backward()
        given.backward()
        for (name, item), (_, other) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
            torch.testing.assert_close(whole(other.grad), item.grad, msg=lambda text, name=name: f"{name}: {text}")
        for optimizer in optimizers:
            optimizer.step()
    for (_, item), (_, other) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        torch.testing.assert_close(whole(other), item)
    parallel.eval()
    with torch.no_grad():
        torch.testing.assert_close(parallel(own(inputs, sizes, rank)), plain(own(inputs, sizes, rank)))
    return parallel


@on_ranks(1, 2, 3)
def test_values_gradients_and_steps_are_those_of_the_model_that_is_not_parallel(rank: int, ranks: int) -> None:
    for scopes in (FUSION, SHARDED, DATA_PARALLEL, INSIDE):
        parallel = assert_equal_training(rank, ranks, made(Classifier), scopes, nn.CrossEntropyLoss())
        assert parallel.state_dict().keys() == Classifier().state_dict().keys()
    scopes = {"words": gt.Split(), "middle": gt.Replicate(), "head": gt.Split()}
    assert_equal_training(rank, ranks, made(WithWords), scopes, nn.CrossEntropyLoss(), ids=True)
    assert_equal_training(rank, ranks, made(Classifier, bias=False), FUSION, nn.CrossEntropyLoss(reduction="sum"))
    with gt.replicate():
        marked = made(Classifier)
        with gt.split():
            marked.head = nn.Linear(DIM, CLASSES).double()
    assert_equal_training(rank, ranks, marked, None, nn.CrossEntropyLoss())  # type: ignore[arg-type]


@on_ranks(1, 3)
def test_every_cross_entropy_is_that_of_torch(rank: int, ranks: int) -> None:
    _, labels, _ = samples(ranks)
    some = labels.clone()
    some[1:3] = 4
    weight = torch.linspace(0.0, 2.0, CLASSES, dtype=torch.float64)
    for loss in (
        nn.CrossEntropyLoss(label_smoothing=0.2),
        nn.CrossEntropyLoss(weight=weight, ignore_index=4),
        nn.CrossEntropyLoss(weight=weight, ignore_index=4, label_smoothing=0.3, reduction="sum"),
    ):
        for scopes in (FUSION, DATA_PARALLEL):
            assert_equal_training(rank, ranks, made(Classifier), scopes, loss, some)
    # Fewer classes than ranks: one has none.
    assert_equal_training(rank, ranks, made(Classifier, 2), FUSION, nn.CrossEntropyLoss(), labels % 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", [nn.CrossEntropyLoss, nn.NLLLoss])
def test_sums_of_16_bit_losses_are_those_of_float32(kind: Callable[..., nn.Module], dtype: torch.dtype) -> None:
    output = torch.tensor([[16384.0, 0.0]], dtype=dtype).expand(8, 2).requires_grad_()
    weight = torch.full((2,), 16384.0, dtype=dtype)
    for labels in (torch.ones(8, dtype=torch.int64), torch.zeros(8, dtype=torch.int64)):
        for mine, theirs in ((None, None), (weight, weight.float())):
            own_sum, amount = own_sum_of(kind(weight=mine, reduction="sum"), "sum", output, labels)
            torch.testing.assert_close(own_sum, kind(weight=theirs, reduction="sum")(output.float(), labels))
            assert amount == (8 if mine is None else 8 * 16384)


class WithTwoHeads(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(DIM, 7)

    def forward(self, inputs: Tensor) -> Any:
        features = self.backbone(inputs)
        return {"fine": self.head(features), "coarse": [self.other(features)]}


class TwoLosses(nn.Module):
    def forward(self, output: Any, labels: Tensor) -> Tensor:
        fine = nn.functional.cross_entropy(output["fine"], labels)
        return fine + 2 * nn.functional.cross_entropy(output["coarse"][0], labels % 7)


@on_ranks(1, 3)
def test_a_model_may_return_several_logits(rank: int, ranks: int) -> None:
    scopes: dict[str, Scope] = {**FUSION, "other": gt.Split()}
    parallel = assert_equal_training(rank, ranks, made(WithTwoHeads), scopes, TwoLosses())
    inputs, _, sizes = samples(ranks)
    parallel.train()
    assert type(parallel(own(inputs, sizes, rank))["coarse"][0]).__name__ == "SplitLogits"


@on_ranks(2)
def test_a_parallel_model_may_be_compiled(rank: int, ranks: int) -> None:
    inputs, labels, sizes = samples(ranks)
    plain = made(Classifier)
    parallel = gt.parallelize(copy.deepcopy(plain), gt.mesh(), FUSION, loss=nn.CrossEntropyLoss())
    parallel.module.backbone.compile(backend="aot_eager")
    for model in (parallel, torch.compile(parallel, backend="aot_eager")):
        parallel.zero_grad()
        model(own(inputs, sizes, rank), own(labels, sizes, rank)).backward()
        plain.zero_grad()
        nn.functional.cross_entropy(plain(inputs), labels).backward()
        for parameter, other in zip(plain.parameters(), parallel.parameters(), strict=True):
            torch.testing.assert_close(whole(other.grad), parameter.grad)


@on_ranks(2)
def test_an_optimizer_may_work_on_split_and_whole_parameters_at_once(rank: int, ranks: int) -> None:
    """Over plain tensors and DTensors, those of CUDA's default: many at once."""
    inputs, labels, sizes = samples(ranks)
    makers: list[Callable[..., torch.optim.Optimizer]] = [
        lambda of: torch.optim.AdamW(of, lr=0.1, foreach=True),
        lambda of: torch.optim.Adam(of, lr=0.1, fused=True),
        lambda of: torch.optim.SGD(of, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    ]
    for maker in makers:
        plain = made(Classifier)
        parallel = gt.parallelize(copy.deepcopy(plain), gt.mesh(), FUSION, loss=nn.CrossEntropyLoss())
        optimizers = [maker(item.parameters()) for item in (plain, parallel)]
        for _ in range(2):
            nn.functional.cross_entropy(plain(inputs), labels).backward()
            parallel(own(inputs, sizes, rank), own(labels, sizes, rank)).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for parameter, other in zip(plain.parameters(), parallel.parameters(), strict=True):
            torch.testing.assert_close(whole(other), parameter)
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):  # outside of a step as ever
        torch._foreach_mul(list(parallel.parameters()), 2.0)


class WithUnused(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(3, 3)


@on_ranks(2)
def test_parameters_that_no_loss_depends_on_are_named(rank: int, ranks: int) -> None:
    inputs, labels, sizes = samples(ranks)
    parallel = gt.parallelize(made(WithUnused), gt.mesh(), {"": gt.Replicate()}, loss=nn.CrossEntropyLoss())
    parallel(own(inputs, sizes, rank), own(labels, sizes, rank)).backward()
    parallel.zero_grad()
    with pytest.raises(
        InvalidArgument, match=r"parameters 'unused.weight', 'unused.bias', or its backward pass failed"
    ):
        parallel(own(inputs, sizes, rank), own(labels, sizes, rank))


class Normed(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.backbone.append(nn.BatchNorm1d(DIM))


@on_ranks(2)
def test_ranks_evaluate_with_the_statistics_of_rank_0(rank: int, ranks: int) -> None:
    inputs, labels, sizes = samples(ranks)
    for scopes in (FUSION, SHARDED, DATA_PARALLEL):
        model: Any = made(Normed)
        parallel = gt.parallelize(model, gt.mesh(), scopes, loss=nn.CrossEntropyLoss())
        for _ in range(2):
            parallel(own(inputs, sizes, rank), own(labels, sizes, rank)).backward()
            parallel.zero_grad()
        found = [value.clone() for value in model.backbone[-1].buffers()]
        for value in found:
            parallel.mesh.whole.link.broadcast_from_first(value)
        parallel.eval()
        with torch.no_grad():
            parallel(own(inputs, sizes, rank), own(labels, sizes, rank))
        for value, expected in zip(model.backbone[-1].buffers(), found, strict=True):
            torch.testing.assert_close(value, expected)


@on_ranks(2)
def test_ranks_in_other_modes_are_told_before_they_share_statistics(rank: int, ranks: int) -> None:
    inputs, labels, sizes = samples(ranks)
    model: Any = made(Normed)
    parallel = gt.parallelize(model, gt.mesh(), DATA_PARALLEL, loss=nn.CrossEntropyLoss())
    parallel(own(inputs, sizes, rank), own(labels, sizes, rank)).backward()
    parallel.train(mode=rank == 1)
    with pytest.raises(SpecMismatch, match="whether they train"):
        parallel(own(inputs, sizes, rank), own(labels, sizes, rank))
    parallel.eval()
    parallel(own(inputs, sizes, rank), own(labels, sizes, rank))
    first = [value.clone() for value in model.backbone[-1].buffers()]
    for value, expected in zip(model.backbone[-1].buffers(), first, strict=True):
        parallel.mesh.whole.link.broadcast_from_first(expected)
        torch.testing.assert_close(value, expected)


@on_ranks(2)
def test_a_frozen_parameter_that_is_trained_later_is_named(rank: int, ranks: int) -> None:
    inputs, labels, sizes = samples(ranks)
    model: Any = made(Classifier)
    model.backbone.requires_grad_(False)
    parallel = gt.parallelize(model, gt.mesh(), DATA_PARALLEL, loss=nn.CrossEntropyLoss())
    parallel(own(inputs, sizes, rank), own(labels, sizes, rank)).backward()
    model.backbone.requires_grad_(True)
    with pytest.raises(InvalidArgument, match=r"parameter 'backbone.0.weight' was frozen when gt.parallelize was"):
        parallel(own(inputs, sizes, rank), own(labels, sizes, rank))
    with torch.no_grad():
        parallel(own(inputs, sizes, rank), own(labels, sizes, rank))
    model.backbone.requires_grad_(False)
    parallel(own(inputs, sizes, rank), own(labels, sizes, rank)).backward()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(CLASSES, DIM), nn.Linear(DIM, CLASSES, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Any:
        return self.head(self.words(ids))


@on_ranks(1, 2)
def test_what_is_one_or_has_values_on_a_model_of_the_meta_device_stays_so() -> None:
    """Parameters that are one stay so, and what has values keeps them."""
    with torch.device("meta"):
        model = Tied()
    model.head.register_buffer("scale", torch.full((2,), 7.0))
    parallel = gt.parallelize(model, gt.mesh(), {"": gt.Replicate()}, loss=nn.CrossEntropyLoss())
    assert parallel.module.head.weight is parallel.module.words.weight
    assert torch.equal(parallel.module.head.scale, torch.full((2,), 7.0))
    with torch.device("meta"):
        blank = nn.Linear(2, 2)
        blank.register_buffer("scale", torch.ones(2))
    with pytest.raises(InvalidArgument, match=r"buffer 'scale' of .* is on the meta device"):
        gt.parallelize(blank, gt.mesh(), {"": gt.Replicate()})


@on_ranks(1, 2)
def test_split_logits_may_be_used_more_than_once(rank: int, ranks: int) -> None:
    """Two losses of the same logits, and logits that are read beside a loss."""
    inputs, labels, sizes = samples(ranks)
    plain = made(Classifier)
    parallel = gt.parallelize(copy.deepcopy(plain), gt.mesh(), FUSION)
    mine, own_labels = own(inputs, sizes, rank), own(labels, sizes, rank)
    cross = nn.functional.cross_entropy
    logits = parallel(mine)
    (0.3 * cross(logits, own_labels) + 0.7 * cross(logits, own_labels.flip(0))).backward()
    expected = plain(inputs)
    flipped = torch.cat([label.flip(0) for label in torch.split(labels, sizes)])
    (0.3 * cross(expected, labels) + 0.7 * cross(expected, flipped)).backward()
    for parameter, other in zip(plain.parameters(), parallel.parameters(), strict=True):
        torch.testing.assert_close(whole(other.grad), parameter.grad)
    torch.testing.assert_close(logits.whole(), own(expected, sizes, rank))
    logits = parallel(mine)
    cross(logits, own_labels).backward()
    with pytest.raises(InvalidArgument, match=r"take what you need of them before it"):
        logits.whole()


class InList(nn.Module):
    """Layers in a list, which has no forward of its own; a split one that is not the last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(INPUTS, INPUTS), nn.Linear(INPUTS, INPUTS)])
        self.wide, self.head = nn.Linear(INPUTS, 8), nn.Linear(8, CLASSES)

    def forward(self, inputs: Tensor) -> Any:
        for layer in self.layers:
            inputs = torch.tanh(layer(inputs))
        wide: Any = self.wide(inputs)
        return self.head(torch.tanh(wide.whole() if hasattr(wide, "whole") else wide))


class ManyTimes(nn.CrossEntropyLoss):
    """A loss of one's own."""

    def forward(self, inputs: Tensor, target: Tensor) -> Tensor:
        return 3 * super().forward(inputs, target)


@on_ranks(2)
def test_layers_may_be_in_a_list_and_behind_a_split_one(rank: int, ranks: int) -> None:
    for shard in (False, True):
        scopes: dict[str, Scope] = {"layers": gt.Replicate(shard=shard), "wide": gt.Split(), "head": gt.Replicate()}
        for loss in (nn.CrossEntropyLoss(), ManyTimes()):
            parallel = assert_equal_training(rank, ranks, made(InList), scopes, loss)
        hardware = gt.Hardware.named("h200")
        parallel.train()
        inputs, labels, sizes = samples(ranks)
        parallel(own(inputs, sizes, rank), own(labels, sizes, rank)).backward()
        assert {part.name for part in parallel.plan_for(hardware).parts} == {"layers", "wide", "head", ""}


class WithFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.function = lambda output, labels: nn.functional.cross_entropy(output, labels)

    def forward(self, output: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.function(output, labels)
        return loss


@on_ranks(2)
def test_ranks_that_call_a_model_in_different_ways_are_told(rank: int, ranks: int) -> None:
    """Ranks that call a model in different ways; a rank that fails where the others do not ask."""
    inputs, labels, sizes = samples(ranks)
    mine, own_labels = own(inputs, sizes, rank), own(labels, sizes, rank)
    parallel = gt.parallelize(made(Classifier), gt.mesh(), FUSION, loss=WithFunction())
    with pytest.raises(SpecMismatch, match="rank 0 and rank 1 disagree on whether labels are given"):
        parallel(mine, own_labels if rank else None)
    parallel.train(rank == 0)
    with pytest.raises(SpecMismatch, match=r"disagree on whether they train \(model.train\(\)\)"):
        parallel(mine)
    parallel.train()
    parallel(mine, own_labels).backward()
    alone = gt.parallelize(made(Classifier), gt.mesh(), DATA_PARALLEL, loss=nn.CrossEntropyLoss()).eval()
    if rank == 0:  # nobody else is in this call
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            alone(mine[:, 1:])
    alone.train()
    alone(mine, own_labels).backward()


@on_ranks(2)
def test_losses_of_whole_outputs_are_means_over_all_that_counts(rank: int, ranks: int) -> None:
    """Of outputs that no layer has split: images of labels, soft ones, weights beside labels that do not count."""
    torch.manual_seed(7)
    sizes = SIZES[ranks]
    inputs = torch.randn(sum(sizes), 4, 2, 3, dtype=torch.float64)
    hard = torch.randint(0, CLASSES, (sum(sizes), 2, 3))
    hard[1] = 255
    soft = torch.rand(sum(sizes), CLASSES, 2, 3, dtype=torch.float64).softmax(1)
    weight = torch.linspace(0.1, 2.0, CLASSES, dtype=torch.float64)
    cases: list[tuple[nn.Module, Tensor]] = [
        (nn.CrossEntropyLoss(), soft),
        (nn.CrossEntropyLoss(weight=weight, ignore_index=255), hard),
        (nn.NLLLoss(weight=weight, ignore_index=255), hard),
    ]
    for loss, labels in cases:
        plain = made(nn.Conv2d, 4, CLASSES, 1)
        parallel = gt.parallelize(copy.deepcopy(plain), gt.mesh(), {"": gt.Replicate()}, loss=loss)
        expected, given = loss(plain(inputs), labels), parallel(own(inputs, sizes, rank), own(labels, sizes, rank))
        torch.testing.assert_close(given, expected)
        expected.backward()
        given.backward()
        torch.testing.assert_close(parallel.module.weight.grad, plain.weight.grad)


@on_ranks(2)
def test_ranks_may_have_labels_of_other_lengths(rank: int, ranks: int) -> None:
    """Texts are padded to the longest of a rank's batch."""
    torch.manual_seed(7)
    texts = [torch.randn(2, 4, 3 + 2 * other, dtype=torch.float64) for other in range(ranks)]
    labels = [torch.randint(0, CLASSES, (2, 3 + 2 * other)) for other in range(ranks)]
    plain = made(nn.Conv1d, 4, CLASSES, 1)
    parallel = gt.parallelize(copy.deepcopy(plain), gt.mesh(), {"": gt.Replicate()}, loss=nn.CrossEntropyLoss())
    sums = [
        nn.functional.cross_entropy(plain(text), label, reduction="sum")
        for text, label in zip(texts, labels, strict=True)
    ]
    expected, given = sum(sums) / sum(label.numel() for label in labels), parallel(texts[rank], labels[rank])
    torch.testing.assert_close(given, expected)
    expected.backward()
    given.backward()
    torch.testing.assert_close(parallel.module.weight.grad, plain.weight.grad)


@on_ranks(2)
def test_several_inputs_and_labels_are_arguments_of_a_model_with_its_own_loss(rank: int, ranks: int) -> None:
    """Of a model that computes its loss: several inputs as a tuple or a dict, and labels behind them."""
    inputs, labels, sizes = samples(ranks)

    class Own(Classifier):
        def forward(self, left: Tensor, right: Tensor, labels: Tensor) -> Any:
            return nn.functional.cross_entropy(self.head(self.backbone(left - right)), labels)

    plain = made(Own)
    parallel = gt.parallelize(copy.deepcopy(plain), gt.mesh(), FUSION)
    left, right, own_labels = (own(item, sizes, rank) for item in (inputs, inputs.flip(1), labels))
    expected = plain(inputs, inputs.flip(1), labels)
    for given in (
        parallel((left, right), own_labels),
        parallel({"left": left, "right": right}, own_labels),
        parallel((left, right, own_labels)),
    ):
        torch.testing.assert_close(given, expected)


@on_ranks(3)
def test_a_rank_without_samples_takes_part_whatever_a_model_returns(rank: int, ranks: int) -> None:
    """A rank without samples, where a model returns several tensors, gives gradients of 0."""
    inputs, labels, sizes = samples(ranks)

    class Both(Classifier):
        def forward(self, inputs: Tensor) -> Any:
            features = self.backbone(inputs)
            return {"logits": self.head(features), "norms": (features.square().sum(1), len(inputs))}

    def loss(outputs: Any, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs["logits"], labels) + outputs["norms"][0].mean()

    plain = made(Both)
    parallel = gt.parallelize(copy.deepcopy(plain), gt.mesh(), DATA_PARALLEL, loss=loss)
    expected, given = loss(plain(inputs), labels), parallel(own(inputs, sizes, rank), own(labels, sizes, rank))
    torch.testing.assert_close(given, expected)
    expected.backward()
    given.backward()
    for parameter, other in zip(plain.parameters(), parallel.parameters(), strict=True):
        torch.testing.assert_close(other.grad, parameter.grad)
    parallel.eval()
    with torch.no_grad():
        torch.testing.assert_close(parallel(own(inputs, sizes, rank), own(labels, sizes, rank)), expected)


@on_ranks(2)
def test_what_one_rank_refuses_is_an_error_on_all(rank: int, ranks: int) -> None:
    inputs, labels, sizes = samples(ranks)
    mine, own_labels = own(inputs, sizes, rank), own(labels, sizes, rank)
    parallel = gt.parallelize(made(Classifier), gt.mesh(), FUSION, loss=nn.CrossEntropyLoss())
    bad: list[tuple[Any, Any, type[Exception], str]] = [
        (mine, own_labels + CLASSES, InvalidIds, "is no class"),
        (mine, own_labels[1:], InvalidArgument, "labels and logits of"),
        (mine, own_labels.float(), InvalidArgument, "int64"),
        (mine[:, 1:], own_labels, RuntimeError, "mat1 and mat2"),
        ("images", own_labels, TypeError, "linear"),
    ]
    for given, given_labels, error, message in bad:
        with pytest.raises(error if rank == 0 else SyncError, match=message if rank == 0 else "rank 0 failed"):
            parallel(given, given_labels) if rank == 0 else parallel(mine, own_labels)
    with (
        torch.set_grad_enabled(rank == 0),
        pytest.raises(SpecMismatch, match="rank 0 and rank 1 disagree on whether a gradient is wanted"),
    ):
        parallel(mine, own_labels)
    parallel(mine, own_labels).backward()
    with pytest.raises(SpecMismatch) as raised:  # of what differs alone
        gt.parallelize(made(Classifier, CLASSES + min(rank, 1)), gt.mesh(), FUSION)
    assert "parameters['head.bias'] is '(10,)" in str(raised.value)
    assert "backbone" not in str(raised.value)
    with pytest.raises(InvalidArgument, match="mesh is 2; it must be what"):
        gt.parallelize(made(Classifier), 2, FUSION)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="is a DistributedDataParallel, whose gradients are averaged already"):
        gt.parallelize(nn.parallel.DistributedDataParallel(made(Classifier)), gt.mesh(), DATA_PARALLEL)
    sharded = made(Classifier)
    gt.parallelize(sharded, gt.mesh(), {"": gt.Replicate(shard=True)})
    with pytest.raises(InvalidArgument, match="whose gradients are averaged already"):
        gt.parallelize(sharded, gt.mesh(), DATA_PARALLEL)
    plain = gt.parallelize(made(Classifier), gt.mesh(), DATA_PARALLEL, loss=nn.MSELoss(reduction="none"))
    with pytest.raises(InvalidArgument, match="reduction='none'"):
        plain(mine, torch.zeros(len(mine), CLASSES))
    with pytest.raises(SpecMismatch, match=r"the ranks disagree on gt.parallelize\(\): loss is"):
        gt.parallelize(made(Classifier), gt.mesh(), FUSION, loss=nn.CrossEntropyLoss(label_smoothing=0.1 * (rank + 1)))
    with pytest.raises(SyncError if rank else InvalidArgument, match="rank 0 failed" if rank else "'bckbone'"):
        gt.parallelize(made(Classifier), gt.mesh(), {"bckbone": gt.Replicate()} if rank == 0 else FUSION)


@pytest.mark.parametrize(
    ("scopes", "message"),
    [
        ({}, "must be a dict"),
        ({"head": gt.Split()}, r"parameter 'backbone.0.weight' is in no scope; name its module"),
        ({"backbone": gt.Replicate(), "tail": gt.Split()}, "'tail' is no module of the model; its own are 'backbone'"),
        ({"backbone": gt.Split(), "head": gt.Split()}, "'backbone' is a Sequential, which cannot be split"),
        ({"backbone": gt.Replicate(), "head": "split"}, r"must be gt.Replicate\(\) or gt.Split\(\)"),
        ({"": gt.Replicate(shard=True), "head": gt.Split()}, "scope 'head' lies inside scope ''"),
        ({"": gt.Replicate(), "backbone": gt.Replicate()}, "scope 'backbone' lies inside scope ''"),
    ],
)
def test_scopes_that_cannot_be_are_refused(scopes: dict[str, Scope], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        gt.parallelize(Classifier(), gt.mesh(), scopes)


def test_a_parallel_model_is_not_made_parallel_again() -> None:
    model = Classifier()
    parallel = gt.parallelize(model, gt.mesh(), FUSION)
    for again, message in ((model, "'head' is a SplitLinear"), (parallel, "'the model' is a ParallelModel")):
        with pytest.raises(InvalidArgument, match=message):
            gt.parallelize(again, gt.mesh(), {"": gt.Replicate()})


def test_parameters_that_are_one_are_sharded_together() -> None:
    tied = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))
    tied[1].weight = tied[0].weight
    gt.parallelize(tied, gt.mesh(), {"0": gt.Replicate(), "1": gt.Replicate()})
    with pytest.raises(InvalidArgument, match=r"'0.weight' and '1.weight' are one, in the scopes '0' and '1'"):
        gt.parallelize(tied, gt.mesh(), {"0": gt.Replicate(), "1": gt.Replicate(shard=True)})


def test_layers_that_cannot_be_split_say_why() -> None:
    tied = Classifier()
    tied.other = nn.Linear(DIM, CLASSES)
    tied.other.weight = tied.head.weight
    hooked = Classifier()
    hooked.head.register_forward_hook(lambda *_: None)
    for model, message in ((tied, "are one, and a split layer has its own"), (hooked, "has hooks")):
        with pytest.raises(InvalidArgument, match=message):
            gt.parallelize(model, gt.mesh(), {"": gt.Replicate(), "head": gt.Split()})
    for setting in ({"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}):
        with pytest.raises(InvalidArgument, match=next(iter(setting))):
            gt.parallelize(nn.Embedding(4, 2, **setting), gt.mesh(), {"": gt.Split()})  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="no module of the model was made inside"):
        gt.parallelize(Classifier(), gt.mesh())
    head = gt.ClassHead(None, "c", num_classes=4, dim=2, rows="ranks")  # whose loss is that of all ranks already
    for loss in (nn.Linear(2, 2), head):
        with pytest.raises(InvalidArgument, match=r"loss has parameters.*make it part of the model"):
            gt.parallelize(Classifier(), gt.mesh(), FUSION, loss=loss)
