"""Ranks of a parallel model that fail or die in a step, and backward passes that nothing would average."""

from __future__ import annotations

import copy
import gc
import os
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import geartrain as gt
from geartrain.ams.values.errors import InvalidArgument, RankLost, SpecMismatch, SyncError
from geartrain.bridge.parallel.scopes import Scope
from tests.support.dying import Dies
from tests.support.rank_processes import on_ranks, run_ranks
from tests.unit.bridge.parallel.test_parallelize import (
    DATA_PARALLEL,
    FUSION,
    SHARDED,
    Classifier,
    WithWords,
    made,
    own,
    own_samples,
    samples,
)

WORDS: dict[str, Scope] = {"words": gt.Split(), "middle": gt.Replicate(), "head": gt.Split()}


class Broken(RuntimeError):
    pass


class WithOwnLoss(Classifier):
    """Fails where it is told to: between what the ranks do together."""

    fails_at = ""

    def forward(self, inputs: Tensor, labels: Tensor) -> Any:
        logits = self.head(self.backbone(inputs))
        self.reach("behind the head")
        loss = F.cross_entropy(logits, labels)
        self.reach("behind the loss")
        accuracy = (logits.whole().detach().argmax(1) == labels).sum()
        self.reach("at the end")
        return loss, accuracy

    def reach(self, place: str) -> None:
        if self.fails_at == place:
            raise Broken(place)


def told(rank: int) -> Any:
    return pytest.raises(Broken if rank == 0 else SyncError, match=None if rank == 0 else "rank 0 failed")


@on_ranks(2, 3)
def test_a_rank_that_fails_behind_a_split_layer_tells_the_others(rank: int, ranks: int) -> None:
    """Behind a split embedding; in and behind what the loss does with the ranks."""
    ids, labels, sizes = samples(ranks, ids=True)
    mine, own_labels = own(ids, sizes, rank), own(labels, sizes, rank)
    model = made(WithWords)
    parallel = gt.parallelize(model, gt.mesh(), WORDS, loss=nn.CrossEntropyLoss())
    parallel(mine, own_labels).backward()

    def fail(*_: object) -> None:
        raise Broken

    handle = model.middle.register_forward_hook(fail) if rank == 0 else None
    with told(rank):
        parallel(mine, own_labels)
    if handle is not None:
        handle.remove()
    parallel(mine, own_labels).backward()


@on_ranks(2, 3)
def test_a_rank_that_fails_behind_the_head_tells_the_others(rank: int, ranks: int) -> None:
    """In the model, where the loss is torch's; in training, and in evaluation behind the last collective."""
    mine, own_labels = own_samples(rank, ranks)

    class FailsLate(Classifier):
        fails, looks = False, False

        def forward(self, inputs: Tensor) -> Any:
            logits = self.head(self.backbone(inputs))
            result = logits.whole() if self.looks else logits
            if self.fails:
                raise Broken
            return result

    model = made(FailsLate)
    parallel = gt.parallelize(model, gt.mesh(), FUSION, loss=nn.CrossEntropyLoss())
    model.fails = rank == 0
    with told(rank):
        parallel(mine, own_labels)
    model.looks = True
    parallel.eval()
    with told(rank), torch.no_grad():
        parallel(mine)
    model.fails = model.looks = False
    with pytest.raises(SpecMismatch, match="disagree on the layer"):
        logits = parallel.train()(mine)
        logits.whole() if rank == 0 else F.cross_entropy(logits, own_labels)
    parallel(mine, own_labels).backward()


@on_ranks(2)
def test_a_rank_that_fails_where_nothing_is_split_tells_the_others(rank: int, ranks: int) -> None:
    """A model of one's own loss: without the error of one, ranks would average gradients of different steps."""
    mine, own_labels = own_samples(rank, ranks)

    class Own(Classifier):
        fails = False

        def forward(self, inputs: Tensor, labels: Tensor) -> Any:
            if self.fails:
                raise Broken
            return F.cross_entropy(self.head(self.backbone(inputs)), labels)

    model = made(Own)
    parallel = gt.parallelize(model, gt.mesh(), DATA_PARALLEL)
    model.fails = rank == 0
    with told(rank):
        parallel(mine, own_labels)
    model.fails = False
    parallel(mine, own_labels).backward()
    parallel.eval()
    if rank == 0:  # looks at its samples alone
        with torch.no_grad():
            parallel(mine, own_labels)


def fail_between_sharded_parts(rank: int, ranks: int, folder: Path) -> None:
    """Others gather parameters then, and cannot be told: its own error comes out, and they find this rank gone."""
    mine, own_labels = own_samples(rank, ranks)
    scopes: dict[str, Scope] = {
        "backbone.0": gt.Replicate(shard=True),
        "backbone.2": gt.Replicate(shard=True),
        "head": gt.Split(),
    }
    model = made(Classifier)
    loss, calls = nn.CrossEntropyLoss(), count()
    parallel = gt.parallelize(model, gt.mesh(), scopes, loss=loss, micro_batches=3 if folder.name == "parts" else 1)
    parallel(mine, own_labels).backward()

    def fail(*_: object) -> None:
        if next(calls) == (1 if folder.name == "parts" else 0):
            raise Broken

    if rank == 0:
        model.get_submodule("backbone.1").register_forward_hook(fail)
        with pytest.raises(Broken):
            parallel(mine, own_labels)
        with pytest.raises(SyncError, match=r"failed on this rank while the others gathered .*Broken"):
            parallel(mine, own_labels)  # the others' step would be that one
        os._exit(0)
    with pytest.raises(RankLost):
        parallel(mine, own_labels)
    (folder / f"told-{rank}").touch()
    os._exit(0)  # the group is not whole


@on_ranks(2, 3)
def test_a_rank_that_fails_in_a_loss_of_its_own_tells_the_others(rank: int, ranks: int) -> None:
    inputs, labels, sizes = samples(ranks)
    mine, own_labels = own(inputs, sizes, rank), own(labels, sizes, rank)
    model = made(WithOwnLoss)
    parallel = gt.parallelize(model, gt.mesh(), FUSION)
    for place in ("behind the head", "behind the loss", "at the end"):
        model.fails_at = place if rank == 0 else ""
        with told(rank):
            parallel(mine, own_labels)
        model.fails_at = ""
        parallel(mine, own_labels)[0].backward()
    fails = False

    def loss(logits: Any, labels: Tensor) -> Tensor:
        value = F.cross_entropy(logits, labels)
        if fails:
            raise Broken
        return value

    parallel = gt.parallelize(made(Classifier), gt.mesh(), FUSION, loss=loss)
    fails = rank == 0
    with told(rank):
        parallel(mine, own_labels)
    fails = False
    parallel(mine, own_labels).backward()


@on_ranks(2)
def test_a_backward_pass_that_nothing_would_average_is_refused(rank: int, ranks: int) -> None:
    inputs, labels, sizes = samples(ranks)
    loss = nn.CrossEntropyLoss()
    plain = made(Classifier)
    for scopes in (DATA_PARALLEL, FUSION, DATA_PARALLEL):  # the hooks on parameters of the first one stay
        parallel = gt.parallelize(copy.deepcopy(plain), gt.mesh(), scopes, loss=loss)
        mine, own_labels = own(inputs, sizes, rank), own(labels, sizes, rank)
        first, second = parallel(mine, own_labels), parallel(mine + 1, own_labels)
        first.backward()
        with pytest.raises(InvalidArgument, match="backward\\(\\) was called twice after the last forward pass"):
            second.backward()
        for sums in (True, False):
            parallel.zero_grad()
            plain.zero_grad()
            (loss(plain(inputs), labels) + loss(plain(inputs + 1), labels)).backward()
            if sums:
                (parallel(mine, own_labels) + parallel(mine + 1, own_labels)).backward()
            else:
                with parallel.no_sync():
                    parallel(mine, own_labels).backward()
                parallel(mine + 1, own_labels).backward()
            given = parallel.module.backbone[0].weight.grad
            torch.testing.assert_close(given, plain.backbone[0].weight.grad)


@on_ranks(2)
def test_backward_passes_that_are_averaged_are_not_refused(rank: int, ranks: int) -> None:
    """Segments that compute again, losses of different parameters, a penalty of the weights alone."""
    inputs, labels, sizes = samples(ranks)
    mine, own_labels = own(inputs, sizes, rank), own(labels, sizes, rank)

    class Segments(Classifier):
        def forward(self, inputs: Tensor) -> Any:
            features = checkpoint(self.backbone, inputs.requires_grad_(), use_reentrant=True)
            return checkpoint(self.head, features, use_reentrant=True)

    class Apart(Classifier):
        def forward(self, inputs: Tensor, labels: Tensor) -> Any:
            features = self.backbone(inputs)
            return features.square().mean(), F.cross_entropy(self.head(features.detach()), labels)

    plain = made(Classifier)
    parallel = gt.parallelize(made(Segments), gt.mesh(), DATA_PARALLEL, loss=nn.CrossEntropyLoss())
    for item, given in ((plain, inputs), (parallel, mine)):
        sum(0.5 * weight.square().sum() for weight in item.parameters()).backward()  # type: ignore[union-attr]
        (F.cross_entropy(item(given), labels) if item is plain else item(given, own_labels)).backward()
    for weight, other in zip(plain.parameters(), parallel.parameters(), strict=True):
        torch.testing.assert_close(other.grad, weight.grad)
    parallel = gt.parallelize(made(Apart), gt.mesh(), DATA_PARALLEL)
    for _ in range(2):
        for loss in parallel(mine, own_labels):
            loss.backward()


def die_in_backward(rank: int, ranks: int, folder: Path, scopes: dict[str, Scope]) -> None:
    mine, own_labels = own_samples(rank, ranks)
    model = made(Classifier)
    parallel = gt.parallelize(model, gt.mesh(), scopes, loss=nn.CrossEntropyLoss())
    parallel(mine, own_labels).backward()
    if rank == 1:
        model.backbone.register_forward_hook(lambda *given: Dies.apply(given[2]))

    def step(model: nn.Module) -> None:
        model(mine, own_labels).backward()

    with pytest.raises(RankLost, match="a rank died"):
        step(parallel)
    del parallel, model
    gc.collect()  # DDP keeps threads of gloo, which would abort this process at its end
    assert not [item for item in gc.get_objects() if type(item) is nn.parallel.DistributedDataParallel]
    (folder / f"told-{rank}").touch()
    os._exit(0)  # the group is not whole


@pytest.mark.parametrize("folder", ["whole", "parts"])
def test_a_rank_that_fails_between_sharded_parts_raises_its_own_error(folder: str, tmp_path: Path) -> None:
    (tmp_path / folder).mkdir()
    run_ranks(fail_between_sharded_parts, 2, tmp_path / folder)
    assert (tmp_path / folder / "told-1").exists()


@pytest.mark.parametrize("scopes", [DATA_PARALLEL, SHARDED, FUSION], ids=["replicated", "sharded", "split"])
def test_a_rank_that_dies_in_a_backward_pass_is_lost(scopes: dict[str, Scope], tmp_path: Path) -> None:
    run_ranks(die_in_backward, 3, tmp_path, scopes)
    assert {path.name for path in tmp_path.glob("told-*")} == {"told-0", "told-2"}
