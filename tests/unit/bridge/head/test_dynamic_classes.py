"""Classes that come and go in mid-training, wherever the rows are, against float64 with every logit written out."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from geartrain.ams.programs.selection import FullSoftmax, PartialFC
from geartrain.ams.values.errors import (
    InvalidArgument,
    InvalidIds,
    InvalidRows,
    NonFinite,
    ShardUnavailable,
    SpecMismatch,
    SyncError,
)
from geartrain.ams.values.optimizers.registry import SparseMomentum
from geartrain.ams.values.specs import Normal
from geartrain.bridge.head.class_head import ClassHead
from geartrain.bridge.head.loss.margins.angular import CosFace
from geartrain.bridge.head.selection.knn_selection import KNNSelection, KNNSoftmax
from geartrain.bridge.placements.device_rows import DeviceRows
from geartrain.bridge.rows.optimizer import RowOptimizer
from geartrain.bridge.rows.serialization import state_from_bytes, state_to_bytes
from geartrain.launch.hosting import local
from tests.support import heads
from tests.support.rank_processes import on_ranks
from tests.support.reference import FakeCluster, plain_gradients

CLASSES, DIM, BATCH = 60, 6, 9
MARGIN = CosFace(8, 0.2)
OPTIMIZER = SparseMomentum(lr=0.3, momentum=0.9, weight_decay=1e-2)
PLACES = ["pull", "hosted", "ranks"]


make_head = partial(
    heads.make_head,
    num_classes=CLASSES,
    dim=DIM,
    initializer=Normal(std=0.3),
    seed=7,
    select=FullSoftmax(),
    margin=MARGIN,
    optimizer=OPTIMIZER,
    num_live_classes=50,
)


def living_ids(head: ClassHead) -> Tensor:
    return torch.from_numpy(heads.living_ids(head))


def batch_of(head: ClassHead, seed: int) -> tuple[Tensor, Tensor]:
    return heads.living_batch(head, BATCH, seed)


def train(head: ClassHead, steps: int, rank: int = 0, ranks: int = 1) -> list[float]:
    return heads.train(head, range(head.step, head.step + steps), rank, ranks, batch=partial(batch_of, head))


class Reference:
    """Rows and velocities in float64, over the live classes alone."""

    def __init__(self, head: ClassHead, select: FullSoftmax | PartialFC) -> None:
        self.rows, self.select = head.weights().double(), select
        self.velocity = torch.zeros_like(self.rows)

    def step(self, head: ClassHead, features: Tensor, labels: Tensor) -> tuple[float, Tensor]:
        ids = living_ids(head)
        numbers = torch.searchsorted(ids, labels)
        active = ids[torch.from_numpy(self.select.select(numbers.numpy(), len(ids), head.step).ids)]
        targets = torch.searchsorted(active, labels)
        loss, x_gradient, w_gradient = plain_gradients(features, self.rows[active], targets, MARGIN.combined)
        self.velocity[active] *= OPTIMIZER.momentum
        self.velocity[active] += w_gradient + OPTIMIZER.weight_decay * self.rows[active]
        self.rows[active] -= OPTIMIZER.lr * self.velocity[active]
        return float(loss), x_gradient

    def change(self, ids: Tensor, rows: Tensor | None = None) -> None:
        self.velocity[ids] = 0
        if rows is not None:
            self.rows[ids] = rows.double()


@pytest.mark.parametrize("rows", PLACES)
@pytest.mark.parametrize("select", [FullSoftmax(), PartialFC(0.3, seed=5)], ids=["full", "partial"])
def test_steps_over_the_living_classes_equal_the_float64_reference(
    cluster: Any, rows: str, select: FullSoftmax | PartialFC
) -> None:
    head = make_head(cluster, rows=rows, select=select)
    truth, optimizer = Reference(head, select), RowOptimizer(head)

    def steps(count: int) -> None:
        for _ in range(count):
            features, labels = batch_of(head, head.step)
            expected, x_gradient = truth.step(head, features, labels)
            loss = head(features, labels)
            loss.backward()
            optimizer.step()
            assert float(loss.detach()) == pytest.approx(expected, rel=1e-5)
            assert features.grad is not None
            torch.testing.assert_close(features.grad.double(), x_gradient, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(head.weights().double(), truth.rows, rtol=1e-4, atol=1e-5)

    initial = head.weights()
    steps(3)
    gone = torch.tensor([31, 3, 4, 49])
    head.retire_classes(gone)
    truth.change(gone)
    steps(3)
    given = torch.randn(2, DIM)
    new = head.add_classes(2, rows=given)
    assert new.tolist() == [3, 4]
    truth.change(new, given)
    steps(3)
    more = head.add_classes(5)
    assert more.tolist() == [31, 49, 50, 51, 52]
    truth.change(more, initial[more])
    steps(3)


@pytest.mark.parametrize("rows", PLACES)
def test_a_retired_class_is_refused_as_label_never_predicted_and_still_readable(cluster: Any, rows: str) -> None:
    head = make_head(cluster, rows=rows)
    train(head, 2)
    before, gone = head.weights(), torch.tensor([0, 17, 18])
    head.retire_classes(gone)
    assert head.num_live_classes == 47
    assert head.retired.tolist() == [0, 17, 18, *range(50, 60)]
    with pytest.raises(InvalidIds, match=r"label 17 at index 1 is no live class.*add_classes"):
        head(torch.randn(2, DIM), torch.tensor([1, 17]))
    scores, found = head.predict(before[gone], k=47)
    assert all(sorted(item) == living_ids(head).tolist() for item in found.tolist())
    assert (scores[:, 1:] <= scores[:, :-1]).all()
    with pytest.raises(InvalidArgument, match="k is 48; it must be an integer from 1 to 47"):
        head.predict(before[gone], k=48)
    train(head, 2)
    assert torch.equal(head.weights(gone), before[gone])


def test_a_retired_class_keeps_no_momentum(cluster: Any) -> None:
    head = make_head(cluster, optimizer=SparseMomentum(lr=0.3, momentum=0.9))
    train(head, 2)
    gone = torch.tensor([4, 5])
    head.retire_classes(gone)
    before = head.weights()
    head.table.push(torch.tensor([4, 5, 6]), torch.zeros(3, DIM))  # type: ignore[attr-defined]
    assert torch.equal(head.weights(gone), before[gone])
    assert not torch.equal(head.weights(torch.tensor([6])), before[6:7])
    alone = make_head(None)
    train(alone, 2)
    alone.retire_classes(gone)
    assert isinstance(alone.table, DeviceRows)
    assert alone.table.slots_LS is not None
    assert not alone.table.slots_LS[gone].any()
    assert alone.table.slots_LS[6].any()


@pytest.mark.parametrize("rows", PLACES)
def test_a_new_class_imprinted_from_examples_is_recognised(cluster: Any, rows: str) -> None:
    head = make_head(cluster, rows=rows)
    generator = torch.Generator().manual_seed(1)
    middles = nn.functional.normalize(torch.randn(2, DIM, generator=generator)) * 5
    backbone = nn.Linear(DIM, DIM)
    labels = torch.tensor([0, 1, 1, 0, 1])
    examples = [(middles[labels] + 0.1 * torch.randn(5, DIM, generator=generator), labels)]
    new = head.add_classes(2, examples=examples, backbone=backbone)
    assert new.tolist() == [50, 51]
    assert backbone.training
    with torch.no_grad():
        features = backbone(examples[0][0])
        means = torch.stack([features[labels == item].sum(0) for item in (0, 1)])
        torch.testing.assert_close(head.weights(new), nn.functional.normalize(means))
        assert head.predict(features, k=1)[1][:, 0].tolist() == (labels + 50).tolist()


@pytest.mark.parametrize("rows", ["pull", "hosted"])
def test_a_snapshot_goes_on_with_the_same_classes(rows: str, tmp_path: Path) -> None:
    def build(cluster: Any, reuse: bool = False) -> ClassHead:
        return make_head(cluster, rows=rows, select=KNNSoftmax(active=0.4, k=4, rebuild="epoch", near=1.0), reuse=reuse)

    with local(2) as cluster:
        head = build(cluster)
        train(head, 2)
        head.retire_classes(torch.tensor([7, 8, 20]))
        head.add_classes(1, rows=torch.randn(1, DIM))
        train(head, 2)
        assert isinstance(head.select, KNNSelection)
        assert json.loads(json.dumps(head.get_extra_state())) == head.get_extra_state()  # as a job keeps it
        files = {"head": state_to_bytes(head.state_dict()), "graph": head.select.graph_to_bytes() or b""}
        snapshot = cluster.snapshot(tmp_path, files=files)
        expected = train(head, 3)
        expected_rows, retired = head.weights(), head.retired
    with local(3 if rows == "pull" else 2) as other:  # where they are hosted, sums go in the order of the shards
        other.restore(snapshot.path)
        again = build(other, reuse=True)
        assert isinstance(again.select, KNNSelection)
        again.select.graph_from_bytes(files["graph"])
        again.load_state_dict(state_from_bytes(files["head"]))
        assert torch.equal(again.retired, retired)
        assert again.select.graph is not None
        assert train(again, 3) == expected
        assert torch.equal(again.weights(), expected_rows)


def neighbours_of(head: ClassHead) -> dict[int, list[int]]:
    """The graph in class ids."""
    assert isinstance(head.select, KNNSelection)
    assert head.select.graph is not None
    ids, table = living_ids(head).tolist(), head.select.graph.table
    assert table.num_classes == len(ids)
    return {ids[item]: [ids[number] for number in table.row(item).tolist()] for item in range(len(ids))}


def test_the_graph_follows_at_once(cluster: Any) -> None:
    head = make_head(cluster, select=KNNSoftmax(active=0.4, k=4, rebuild="epoch", near=1.0))
    select = head.select
    assert isinstance(select, KNNSelection)
    train(head, 1)
    before = neighbours_of(head)
    gone = [3, 4, 40]
    head.retire_classes(torch.tensor(gone))
    expected = {
        name: [other for other in near if other not in gone] for name, near in before.items() if name not in gone
    }
    assert neighbours_of(head) == expected
    assert sum(map(len, expected.values())) < 47 * 4
    new = head.add_classes(2, rows=head.weights(torch.tensor([10, 30])) + 1e-3)
    after, rows = neighbours_of(head), nn.functional.normalize(head.weights())
    for item in new.tolist():
        cosines = rows @ rows[item]
        cosines[[item, *head.retired.tolist()]] = -2
        assert after[item] == cosines.topk(4).indices.tolist()
        for other in after[item]:
            assert item in after[other][:2] or other in new
    assert all(len(near) <= 4 and len(set(near)) == len(near) for near in after.values())
    untouched = set(expected) - {other for item in new.tolist() for other in after[item]} - set(new.tolist())
    assert all(after[item] == expected[item] for item in untouched)
    assert select.graph is not None
    assert select.graph.version == 3
    labels = np.array([10, 30])
    active = head._backend.live_classes.select(select, labels, head.step)
    assert {*labels.tolist(), *after[10][:1], *after[30][:1]} <= set(active.ids.tolist())
    assert not set(active.ids.tolist()) & set(head.retired.tolist())
    train(head, 1)
    head.rebuild_graph()
    assert set(neighbours_of(head)) == set(living_ids(head).tolist())
    assert all(len(near) == 4 for near in neighbours_of(head).values())


def test_a_graph_of_other_classes_is_built_anew(cluster: Any, caplog: pytest.LogCaptureFixture) -> None:
    head = make_head(cluster, select=KNNSoftmax(active=0.4, k=4, rebuild="epoch", near=1.0))
    assert isinstance(head.select, KNNSelection)
    train(head, 1)
    state, graph = head.state_dict(), head.select.graph_to_bytes()
    assert graph is not None
    head.retire_classes(torch.tensor([5]))
    head.select.graph_from_bytes(graph)
    train(head, 1)
    assert "has other live classes than the head" in caplog.text
    assert len(neighbours_of(head)) == 49
    head.set_extra_state(state["_extra_state"])
    assert head.num_live_classes == 50
    train(head, 1)
    assert len(neighbours_of(head)) == 50


def test_classes_live_once_where_their_neighbours_are_not_found(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = FakeCluster()
    head = make_head(cluster, select=KNNSoftmax(active=0.4, k=4, rebuild="epoch", near=1.0))
    train(head, 1)
    with monkeypatch.context() as gone:
        gone.setattr(cluster.tables["classes"], "pull_into_async", _no_answer)
        # An error would make the caller add them again.
        assert head.add_classes(2, rows=torch.ones(2, DIM)).tolist() == [50, 51]
    assert "cannot find the nearest classes of new ones" in caplog.text
    assert head.num_live_classes == 52
    train(head, 1)
    assert len(neighbours_of(head)) == 52


def _no_answer(*_: Any, **__: Any) -> Any:
    raise ShardUnavailable("shard 1 did not answer")


def test_changes_wait_for_the_step_and_a_backward_for_its_classes(cluster: Any) -> None:
    head = make_head(cluster)
    features, labels = batch_of(head, 0)
    head(features, labels).backward()
    for change in (lambda: head.retire_classes(torch.tensor([1])), lambda: head.add_classes(1)):
        with pytest.raises(InvalidArgument, match=r"call it, or zero_grad\(\), before the classes change"):
            change()
    RowOptimizer(head).zero_grad()
    loss = head(features, labels)
    head.retire_classes(torch.tensor([1]))
    with pytest.raises(InvalidArgument, match="between this forward pass and its backward; call the head again"):
        loss.backward()


WRONG: list[tuple[Callable[[ClassHead], Any], type[Exception], str]] = [
    (lambda head: head.add_classes(0), InvalidArgument, "num is 0; it must be an integer >= 1"),
    (lambda head: head.add_classes(11), InvalidArgument, "11 classes were to be added, and 10 of 60 ids are free"),
    (
        lambda head: head.add_classes(2, rows=torch.ones(1, DIM)),
        InvalidRows,
        r"must be a floating-point tensor \[2, 6\]",
    ),
    (lambda head: head.add_classes(1, rows=torch.full((1, DIM), torch.nan)), NonFinite, "row 0 of the new"),
    (lambda head: head.add_classes(1, examples=[]), InvalidArgument, "need a backbone="),
    (lambda head: head.add_classes(1, examples=[], backbone=nn.Identity()), InvalidArgument, "new class 0 of 1 has no"),
    (lambda head: head.retire_classes(torch.tensor([60])), InvalidIds, r"60 at index 0 is outside \[0, 60\)"),
    (lambda head: head.retire_classes(torch.tensor([55])), InvalidIds, "class id 55 at index 0 .*no live class"),
    (lambda head: head.retire_classes(torch.tensor([5, 5])), InvalidIds, "class 5 is there 2 times"),
    (lambda head: head.retire_classes(torch.tensor([5.0])), InvalidIds, "torch.float32; they must be a torch.int64"),
    (lambda head: head.retire_classes(torch.tensor(5)), InvalidIds, r"torch.int64 tensor \[N\]"),
    (lambda head: head.retire_classes(torch.arange(50)), InvalidArgument, "keep at least one"),
    (lambda head: head.imprint([(torch.ones(1, DIM), torch.tensor([50]))], nn.Identity()), InvalidIds, "no live class"),
]


@pytest.mark.parametrize(("change", "error", "message"), WRONG)
def test_a_wrong_change_changes_nothing(change: Any, error: type[Exception], message: str) -> None:
    head = make_head(FakeCluster())
    before = head.weights()
    with pytest.raises(error, match=message):
        change(head)
    assert head.num_live_classes == 50
    assert torch.equal(head.weights(), before)


def test_a_head_of_which_few_live_takes_memory_for_those_alone(cluster: Any) -> None:
    head = heads.make_head(
        cluster, "large", num_classes=40_000_000, num_live_classes=100, dim=256, select=PartialFC(0.5)
    )
    features = torch.randn(4, 256, requires_grad=True)
    head(features, torch.tensor([3, 50, 99, 0])).backward()
    RowOptimizer(head).step()
    table = next(table for table in cluster.status().tables if table.name == "large")
    assert table.rows == 50


def test_two_ranks_agree_or_fail_together(tmp_path: Path) -> None:
    mp.spawn(_change_on_a_rank, args=(str(tmp_path),), nprocs=2)
    first, second = (np.load(tmp_path / f"rank{rank}.npz") for rank in range(2))
    np.testing.assert_array_equal(first["rows"], second["rows"])
    np.testing.assert_array_equal(first["retired"], second["retired"])
    np.testing.assert_array_equal(first["graph"], second["graph"])
    alone = make_head(None, select=PartialFC(0.3, seed=5))
    expected = _changes(alone, 0, 1)
    np.testing.assert_allclose(first["losses"] + second["losses"], expected, rtol=1e-5)
    np.testing.assert_allclose(first["rows"], alone.weights().numpy(), rtol=1e-4, atol=1e-5)


def _changes(head: ClassHead, rank: int, ranks: int) -> list[float]:
    """Train, retire, train, add by examples of which each rank has its own, train: this rank's shares of the loss."""
    losses = train(head, 2, rank, ranks)
    head.retire_classes(torch.tensor([2, 49, 11]))
    losses += train(head, 2, rank, ranks)
    images, labels = torch.randn(6, DIM, generator=torch.Generator().manual_seed(3)), torch.tensor([0, 1, 2, 0, 1, 2])
    share = slice(rank, None, ranks)
    new = head.add_classes(3, examples=[(images[share], labels[share])], backbone=nn.Identity())
    assert new.tolist() == [2, 11, 49]
    losses += train(head, 2, rank, ranks)
    return losses


def _change_on_a_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    pulled, here = make_head(FakeCluster(), sync=True), make_head(None, select=PartialFC(0.3, seed=5))
    for head in (pulled, here):
        with pytest.raises(SpecMismatch, match="the ranks disagree on the classes to retire of 'classes'"):
            head.retire_classes(torch.tensor([rank]))
        with pytest.raises(SpecMismatch, match="the ranks disagree on the classes to add"):
            head.add_classes(1, rows=torch.full((1, DIM), float(rank)))
        with pytest.raises(InvalidIds if rank == 1 else SyncError, match=r"no live class|rank 1 failed"):
            head.retire_classes(torch.tensor([5, 55][rank : rank + 1]))
        assert head.num_live_classes == 50
    pulled.retire_classes(torch.tensor([2, 49, 11]))
    pulled.add_classes(1, rows=torch.ones(1, DIM))
    wrote = (pulled.weights(torch.tensor([2])) == 1).all()  # each has a fake table of its own: rank 0 writes
    assert bool(wrote) == (rank == 0)
    near = make_head(FakeCluster(), sync=True, select=KNNSoftmax(active=0.4, k=4, rebuild="epoch", near=1.0))
    near.rebuild_graph()
    near.retire_classes(torch.tensor([7]))
    near.add_classes(2, rows=near.weights(torch.tensor([10, 30])) + 1e-3)
    assert isinstance(near.select, KNNSelection)
    assert near.select.graph is not None
    graph = near.select.graph.table.neighbours
    losses = _changes(here, rank, 2)
    np.savez(
        f"{folder}/rank{rank}.npz",
        losses=losses,
        graph=graph,
        rows=here.weights().numpy(),
        retired=here.retired.numpy(),
    )
    dist.destroy_process_group()


@on_ranks(2)
def test_ranks_refuse_a_retired_label_and_other_classes_together(rank: int) -> None:
    for select in (PartialFC(0.3, seed=5), KNNSoftmax(active=0.4, k=4, rebuild="epoch", near=1.0)):
        head = make_head(FakeCluster(), sync=True, select=select)
        features, labels = batch_of(head, 0)
        wrong = labels.clone()
        wrong[3] = 55 if rank == 1 else labels[3]  # never added; one rank alone reads it
        with pytest.raises(InvalidIds if rank == 1 else SyncError, match=r"label 55|rank 1 was given"):
            head(features.detach(), wrong)
        losses = [float(head(features.detach(), labels).detach())]  # and both go on
        state = head.get_extra_state()
        head.set_extra_state({**state, "retired_runs": [[49 - rank, CLASSES]]})
        with pytest.raises(SpecMismatch, match="different classes"):
            head(features.detach(), torch.zeros_like(labels))
        head.set_extra_state(state)
        losses.append(float(head(features.detach(), labels).detach()))
        assert losses[0] == losses[1]
        if isinstance(head.select, KNNSelection):
            graph = head.select.graph_to_bytes()
            assert graph is not None
            head.retire_classes(torch.tensor([48 if 48 not in labels else 47]))
            head.select.graph_from_bytes(graph)  # of other classes, and this step was prepared before
            assert np.isfinite(float(head(features.detach(), torch.zeros_like(labels)).detach()))
            assert head.select.graph is not None
            assert head.select.graph.table.num_classes == 49


@on_ranks(2)
def test_rows_of_new_classes_that_one_rank_cannot_write_are_an_error_on_both(rank: int) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError("no room")

    head = make_head(None)
    live, assign = head.num_live_classes, head.table.assign
    if rank == 1:
        head.table.assign = fail  # type: ignore[assignment,method-assign]
    with pytest.raises(MemoryError if rank == 1 else SyncError, match=r"no room|rank 1 failed"):
        head.add_classes(1)
    assert head.num_live_classes == live
    head.table.assign = assign  # type: ignore[method-assign]
    head.add_classes(1)
    assert head.num_live_classes == live + 1


@on_ranks(2)
def test_ranks_refuse_to_imprint_a_retired_class_together(rank: int) -> None:
    for rows in ("pull", "ranks"):
        head = make_head(FakeCluster(), rows=rows, sync=rows == "pull")
        before, images = head.weights(), torch.eye(DIM)[:2]
        wrong = [(images, torch.tensor([3, 50 if rank == 1 else 4]))]
        with pytest.raises(InvalidIds if rank == 1 else SyncError, match=r"label 50|rank 1 failed"):
            head.imprint(wrong, nn.Identity())
        assert torch.equal(head.weights(), before)
        assert head.imprint([(images, torch.tensor([3, 4]))], nn.Identity()) == 2
