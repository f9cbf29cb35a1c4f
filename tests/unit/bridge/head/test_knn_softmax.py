"""KNN softmax: which classes it chooses, when its graph is built, and what a resumed head goes on with."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import geartrain as gt
from geartrain.ams.graph.building.neighbours import NeighbourTable
from geartrain.ams.programs.selection import positives_and_sample
from geartrain.ams.values.errors import InvalidArgument, SpecMismatch
from geartrain.bridge.head.backends.active_rows import DeviceActive
from geartrain.bridge.head.backends.ranks.selector import RankSelector
from geartrain.bridge.head.class_head import ClassHead
from geartrain.bridge.head.loss.margins.angular import CosFace
from geartrain.bridge.head.selection import graph_build, knn_selection
from geartrain.bridge.head.selection.knn_selection import KNNSelection, KNNSoftmax
from geartrain.bridge.rows.optimizer import RowOptimizer
from tests.support import heads
from tests.support.plain_graph import plain_build, use_plain_graphs
from tests.support.rank_processes import run_ranks
from tests.support.reference import UNIT_SGD, FakeCluster

CLASSES, DIM = 60, 6
LABELS = np.array([7, 3, 7, 41], np.int64)


@pytest.fixture(autouse=True)
def plain_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    use_plain_graphs(monkeypatch)


def make_head(select: Any, *, cluster: Any = None, **settings: Any) -> ClassHead:
    settings = {"num_classes": CLASSES, "dim": DIM, "margin": CosFace(8, 0.2), "optimizer": UNIT_SGD, **settings}
    return heads.make_head(cluster or FakeCluster(), select=select, **settings)


def selection(head: ClassHead) -> KNNSelection:
    assert isinstance(head.select, KNNSelection)
    return head.select


def version(head: ClassHead) -> int:
    graph = selection(head).graph
    return 0 if graph is None else graph.version


def train(head: ClassHead, steps: int = 1) -> list[float]:
    return heads.train(
        head, range(head.step, head.step + steps), batch=partial(heads.make_batch, 4, CLASSES, DIM), lr=0.1
    )


def test_the_labels_nearest_classes_are_active_and_only_then_random_ones() -> None:
    head = make_head(KNNSoftmax(active=0.25, k=2, rebuild="epoch", near=1.0))
    active = selection(head).select(LABELS, CLASSES, 0)
    graph = selection(head).graph
    assert graph is not None
    near = {int(item) for label in LABELS for item in [label, *graph.table.row(label)]}
    assert near < set(active.ids.tolist())
    assert active.num == 15
    other = selection(head).select(LABELS, CLASSES, 1)
    assert near < set(other.ids.tolist()) != set(active.ids.tolist())
    np.testing.assert_array_equal(selection(head).select(LABELS[::-1], CLASSES, 0).ids, active.ids)


@pytest.mark.parametrize("near", [0.0, 0.25, 1.0])
def test_so_many_of_the_negatives_are_near_and_the_others_random_on_every_device(near: float) -> None:
    head = make_head(KNNSoftmax(active=0.5, k=20, near=near))
    head.rebuild_graph()
    select = selection(head)
    assert select.graph is not None
    active = select.select(LABELS, CLASSES, 5)
    table, first = select.graph.table, 3 + round(near * 27)
    nearest = table.select(LABELS, first, seed=0, step=5)
    others = positives_and_sample(nearest, CLASSES, 30, 0, 5)
    assert active.ids.tolist() == others.ids.tolist() and active.num == 30

    labels_P = np.unique(LABELS)
    ranking = select.ranking(3, CLASSES)
    assert (ranking.neighbours, ranking.near) == (table, near)
    with_rows = make_head(select.settings, cluster=None, rows="ranks")
    selector = RankSelector(with_rows.backend.table, select)  # type: ignore[arg-type]
    selector.on_device = True
    num, here = selector.choose(labels_P, select.live_classes, 5)
    assert isinstance(here, DeviceActive) and here.numbers_A is not None
    assert (num, here.numbers_A.tolist()) == (30, active.ids.tolist())


def test_the_graph_is_that_of_the_normalised_rows() -> None:
    cluster = FakeCluster()
    head = make_head(KNNSoftmax(k=3, rebuild="epoch", near=1.0), cluster=cluster)
    rows = cluster.tables["classes"].rows
    rows[5] = 0.001 * rows[9]  # the same direction, another length
    head.rebuild_graph()
    graph = selection(head).graph
    assert graph is not None and graph.table.row(5)[0] == 9


@pytest.mark.parametrize(("classes", "active"), [(1, 0.1), (60, 1.0)])
def test_a_head_whose_classes_are_all_active_builds_no_graph(classes: int, active: float) -> None:
    head = make_head(KNNSoftmax(active=active, rebuild="epoch", near=1.0), num_classes=classes)
    head(torch.randn(2, DIM), torch.zeros(2, dtype=torch.int64)).backward()
    assert version(head) == 0
    assert selection(head).select(np.zeros(1, np.int64), classes, 0).num == classes


def steps_of_builds(active: float, steps: int) -> list[int]:
    """Where each build costs a tenth of the steps since the last one: C² operations, 6·P·A a step, all times D."""
    found, work = [], 0
    for step in range(steps):
        if 0.6 * work >= CLASSES**2:
            found.append(step)
            work = 0
        work += len(np.unique(labels_of(step))) * round(active * CLASSES)
    return found


def labels_of(step: int) -> np.ndarray:
    return heads.make_batch(4, CLASSES, DIM, step)[1].numpy()


def built_at(head: ClassHead) -> int | None:
    graph = selection(head).graph
    return None if graph is None else graph.step


@pytest.mark.parametrize("rows", ["pull", "hosted", "ranks"])
def test_with_nothing_said_graphs_take_a_tenth_of_the_training(rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the builders of each way
    with gt.local() as cluster:
        head = make_head(KNNSoftmax(0.5, k=4), cluster=None if rows == "ranks" else cluster, rows=rows)
        seen: list[int | None] = []
        for _ in range(130):
            train(head)
            seen.append(built_at(head))
            if head.step % 7 == 0:  # what is looked at between steps counts nothing
                head.eval()(torch.randn(3, DIM), torch.tensor([1, 2, 3]))
                head.train()
    expected = steps_of_builds(0.5, 130)
    assert len(expected) == 2
    assert [step for step in dict.fromkeys(seen) if step is not None] == expected
    assert all(step is None or number >= step for number, step in enumerate(seen))


def test_until_there_is_a_graph_the_negatives_are_random() -> None:
    cluster = FakeCluster()
    head = make_head(KNNSoftmax(0.5, k=4, seed=9), cluster=cluster)
    first = steps_of_builds(0.5, 100)[0]
    for step in range(first + 1):
        train(head)
        expected = positives_and_sample(labels_of(step), CLASSES, 30, 9, step).ids
        pushed = cluster.tables["classes"].pushes[-1].ids
        assert (pushed.tolist() == expected.tolist()) == (step < first)


def test_a_resumed_head_builds_its_graph_when_it_would_have() -> None:
    cluster = FakeCluster()
    head = make_head(KNNSoftmax(0.5, k=4), cluster=cluster)
    first = steps_of_builds(0.5, 100)[0]
    train(head, first - 3)
    state, rows = head.get_extra_state(), cluster.tables["classes"].rows.copy()
    expected = train(head, 6)

    again_cluster = FakeCluster()
    again = make_head(KNNSoftmax(0.5, k=4), cluster=again_cluster)
    again_cluster.tables["classes"].rows[:] = rows
    again.set_extra_state(state)
    assert train(again, 6) == expected
    assert built_at(again) == built_at(head) == first


def test_with_nothing_said_an_epoch_that_ends_renews_the_graph_too() -> None:
    head = make_head(KNNSoftmax(0.5))
    train(head, 2)
    assert version(head) == 0
    head.next_epoch()
    train(head)
    assert (version(head), built_at(head)) == (1, 2)


def slow_builds(seconds: float) -> Any:
    """A clock of builds that take so long, and of steps that take nothing."""

    class Clock:
        now = 0.0

        def monotonic(self) -> float:
            Clock.now += seconds
            return Clock.now

    return Clock()


@pytest.mark.parametrize(("seconds", "patience"), [(0.2, 1), (5.0, 2)])
def test_builds_that_take_long_by_the_clock_are_made_half_as_often(
    seconds: float, patience: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = make_head(KNNSoftmax(0.5, k=4))
    monkeypatch.setattr(knn_selection, "time", slow_builds(seconds))
    first, second, *_ = steps_of_builds(0.5, 200)
    train(head, first + 1)
    assert head.get_extra_state()["graph"]["patience"] == patience
    train(head, second - first)
    assert (built_at(head) == second) == (patience == 1)


@pytest.mark.parametrize("rebuild", ["epoch", "auto"])
def test_a_graph_that_nobody_has_renewed_for_long_is_told_of_once(
    rebuild: str, caplog: pytest.LogCaptureFixture
) -> None:
    head = make_head(KNNSoftmax(0.9, k=4, rebuild=rebuild, near=1.0))
    train(head, 200)
    assert caplog.text.count("call head.next_epoch()") == (1 if rebuild == "epoch" else 0)


def test_by_epochs_the_graph_is_built_by_the_first_step_of_each() -> None:
    head = make_head(KNNSoftmax(rebuild="epoch", near=1.0))
    assert selection(head).graph_age is None
    train(head, 3)
    assert (version(head), selection(head).graph_age) == (1, 3)
    head.next_epoch()
    assert version(head) == 1
    train(head, 2)
    assert (version(head), selection(head).graph_age) == (2, 2)


def test_by_steps_the_graph_is_built_after_so_many() -> None:
    head = make_head(KNNSoftmax(rebuild=3, near=1.0))
    seen = []
    for _ in range(7):
        train(head)
        seen.append(version(head))
    assert seen == [1, 1, 1, 2, 2, 2, 3]


def test_micro_batches_of_one_step_share_their_graph() -> None:
    head = make_head(KNNSoftmax(rebuild="epoch", near=1.0))
    train(head)
    head(torch.randn(2, DIM), torch.tensor([1, 2])).backward()
    head.next_epoch()
    head(torch.randn(2, DIM), torch.tensor([3, 4])).backward()
    assert version(head) == 1


def test_evaluation_neither_builds_anew_nor_moves_on() -> None:
    head = make_head(KNNSoftmax(rebuild="epoch", near=1.0))
    train(head)
    head.next_epoch()
    head.eval()
    head(torch.randn(2, DIM), torch.tensor([1, 2]))
    assert version(head) == 1
    train(head.train())
    assert version(head) == 2


def test_in_the_background_the_old_graph_is_used_until_the_new_one_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    head = make_head(KNNSoftmax(rebuild="background", near=1.0))
    train(head)
    may_build, built = threading.Event(), threading.Event()

    def build_when_told(*arguments: Any) -> NeighbourTable:
        assert may_build.wait(30)
        try:
            return plain_build(*arguments)
        finally:
            built.set()

    monkeypatch.setattr(graph_build, "build_graph", build_when_told)
    head.next_epoch()
    train(head, 3)
    assert version(head) == 1
    pending = selection(head)._pending
    assert pending is not None
    may_build.set()
    pending.result.result(30)
    train(head)
    graph = selection(head).graph
    assert graph is not None and (graph.version, graph.step) == (2, 1)  # it was begun after one update


def test_an_epoch_that_ends_while_a_graph_is_built_begins_the_next_one() -> None:
    head = make_head(KNNSoftmax(rebuild="background", near=1.0))
    train(head)
    head.next_epoch()
    train(head)
    first = selection(head)._pending
    assert first is not None
    head.next_epoch()
    first.result.result(30)
    train(head)
    second = selection(head)._pending
    assert version(head) == 2 and second is not None and second.step == 2


def test_a_build_that_fails_in_the_background_is_told_by_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    head = make_head(KNNSoftmax(rebuild="background", near=1.0))
    train(head)

    def fail(*_: Any) -> NeighbourTable:
        raise InvalidArgument("no memory for the graph")

    monkeypatch.setattr(graph_build, "build_graph", fail)
    head.next_epoch()
    train(head)
    pending = selection(head)._pending
    assert pending is not None and isinstance(pending.result.exception(30), InvalidArgument)
    with pytest.raises(InvalidArgument, match="no memory"):
        train(head)


def test_a_head_that_was_given_its_graph_goes_on_as_if_it_had_not_stopped() -> None:
    cluster = FakeCluster()
    head = make_head(KNNSoftmax(active=0.2, k=4, rebuild="epoch", near=1.0), cluster=cluster)
    train(head, 3)
    state, graph = head.get_extra_state(), selection(head).graph_to_bytes()
    rows = cluster.tables["classes"].rows.copy()
    assert graph is not None
    expected = train(head, 3)

    again_cluster = FakeCluster()
    again = make_head(KNNSoftmax(active=0.2, k=4, rebuild="epoch", near=1.0), cluster=again_cluster)
    again_cluster.tables["classes"].rows[:] = rows
    selection(again).graph_from_bytes(graph)
    again.set_extra_state(state)
    assert train(again, 3) == expected
    assert (version(again), selection(again).graph_age) == (1, 6)


def test_a_head_without_the_graph_of_its_state_says_so_and_builds_one(caplog: pytest.LogCaptureFixture) -> None:
    head = make_head(KNNSoftmax(rebuild="epoch", near=1.0))
    train(head, 2)
    again = make_head(KNNSoftmax(rebuild="epoch", near=1.0))
    train(again, 3)
    again.rebuild_graph()
    assert version(again) == 2
    with caplog.at_level(logging.WARNING):
        again.set_extra_state(head.get_extra_state())
    assert "graph version 1 of step 0 is not in this process" in caplog.text
    train(again)
    assert (version(again), selection(again).graph_age) == (1, 1)


def test_an_epoch_that_ended_before_the_save_is_not_forgotten() -> None:
    head = make_head(KNNSoftmax(rebuild="epoch", near=1.0))
    train(head)
    head.next_epoch()
    graph = selection(head).graph_to_bytes()
    assert graph is not None
    again = make_head(KNNSoftmax(rebuild="epoch", near=1.0))
    selection(again).graph_from_bytes(graph)
    again.set_extra_state(head.get_extra_state())
    train(again)
    assert version(again) == 2


def test_a_graph_of_other_classes_is_refused() -> None:
    head = make_head(KNNSoftmax(rebuild="epoch", near=1.0))
    head.rebuild_graph()
    graph = selection(head).graph_to_bytes()
    assert graph is not None
    other = make_head(KNNSoftmax(rebuild="epoch", near=1.0), num_classes=61)
    with pytest.raises(SpecMismatch, match="60 classes"):
        selection(other).graph_from_bytes(graph)
    with pytest.raises(InvalidArgument, match="graph_to_bytes"):
        selection(other).graph_from_bytes(gt.state_to_bytes({"offsets": 1}))


def test_progress_is_told() -> None:
    head = make_head(KNNSoftmax(rebuild="epoch", near=1.0))
    told: list[tuple[int, int]] = []
    selection(head).on_progress = lambda done, total: told.append((done, total))
    train(head)
    assert told == [(30, 60), (60, 60)]


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"active": 0.0}, "active"),
        ({"active": 1.5}, "active"),
        ({"active": float("nan")}, "active"),
        ({"k": 0}, "k is"),
        ({"k": 2.5}, "k is"),
        ({"rebuild": "daily"}, "rebuild"),
        ({"rebuild": 0}, "rebuild"),
        ({"rebuild": True}, "rebuild"),
        ({"seed": -1}, "seed"),
        ({"near": 1.5}, "near"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(InvalidArgument, match=word):
        KNNSoftmax(**settings)


def test_only_knn_softmax_has_a_graph_to_rebuild() -> None:
    head = make_head(gt.PartialFC(0.5))
    head.next_epoch()
    with pytest.raises(InvalidArgument, match="KNNSoftmax"):
        head.rebuild_graph()


def run_rank(rank: int, folder: Path) -> None:
    builds = 0

    def counted_build(*arguments: Any) -> NeighbourTable:
        nonlocal builds
        builds += 1
        return plain_build(*arguments)

    graph_build.build_graph = counted_build  # type: ignore[assignment]
    cluster = FakeCluster(seed=rank)  # ranks that built for themselves would find other neighbours
    head = make_head(KNNSoftmax(active=0.2, k=3, rebuild="background", near=1.0), cluster=cluster, sync=True)
    rows, active = RowOptimizer(head), []
    with pytest.raises(InvalidArgument, match="ranks build it together"):
        head.eval()(torch.zeros(1, DIM), torch.tensor([0]))
    head.train()
    for step in range(12):
        generator = torch.Generator().manual_seed(step)
        labels = torch.randint(CLASSES, (8,), generator=generator)[4 * rank : 4 * rank + 4]
        head(torch.randn(4, DIM, generator=generator), labels).backward()
        rows.step()
        rows.zero_grad()
        active.append(cluster.tables["classes"].pushes[-1].ids)
        if step == 2:
            head.next_epoch()
        pending = selection(head)._pending
        if step == 6 and pending is not None and rank == 0:
            pending.result.result(30)
    graph = selection(head).graph
    assert graph is not None
    np.savez(
        f"{folder}/rank{rank}.npz",
        active=np.stack(active),
        neighbours=graph.table.neighbours,
        facts=[graph.version, graph.step, builds],
    )


def test_ranks_share_one_graph_that_the_first_one_builds(tmp_path: Path) -> None:
    run_ranks(run_rank, 2, tmp_path)
    first, second = (np.load(tmp_path / f"rank{rank}.npz") for rank in range(2))
    np.testing.assert_array_equal(first["active"], second["active"])
    np.testing.assert_array_equal(first["neighbours"], second["neighbours"])
    assert first["facts"].tolist() == [2, 3, 2]
    assert second["facts"].tolist() == [2, 3, 0]


def run_rank_by_work(rank: int, folder: Path) -> None:
    graph_build.build_graph = plain_build  # type: ignore[assignment]
    knn_selection.time = slow_builds(5.0 if rank == 0 else 0.0)  # type: ignore[assignment]
    head = make_head(KNNSoftmax(0.5, k=4), cluster=FakeCluster(seed=rank), sync=True)
    rows, seen = RowOptimizer(head), []
    for step in range(90):
        generator = torch.Generator().manual_seed(step)
        labels = torch.randint(CLASSES, (8,), generator=generator)[4 * rank : 4 * rank + 4]
        head(torch.randn(4, DIM, generator=generator), labels).backward()
        rows.step()
        rows.zero_grad()
        if rank == 0:
            head.eval()(torch.randn(3, DIM), torch.tensor([1, 2, 3]))  # the others do not
            head.train()
        seen.append(-1 if (built := built_at(head)) is None else built)
    np.savez(f"{folder}/rank{rank}.npz", seen=seen, patience=head.get_extra_state()["graph"]["patience"])


def test_ranks_decide_alike_when_a_graph_is_built_whatever_their_clocks_say(tmp_path: Path) -> None:
    run_ranks(run_rank_by_work, 2, tmp_path)
    first, second = (np.load(tmp_path / f"rank{rank}.npz") for rank in range(2))
    np.testing.assert_array_equal(first["seen"], second["seen"])
    assert first["seen"][-1] > 0
    assert first["patience"] == second["patience"] > 1


def test_a_build_that_the_training_outran_is_begun_again_by_the_next_one() -> None:
    head = make_head(KNNSoftmax(active=0.2, k=3, rebuild="background"))
    select = selection(head)
    train(head)
    head.next_epoch()
    train(head)
    assert select._pending is not None
    select.cancel()  # as a job does when it is interrupted, before its last snapshot
    state, graph = head.get_extra_state(), select.graph_to_bytes()
    again = make_head(KNNSoftmax(active=0.2, k=3, rebuild="background"))
    again_select = selection(again)
    assert graph is not None
    again_select.graph_from_bytes(graph)
    again.set_extra_state(state)
    train(again)
    assert again_select._pending is not None
    again_select._pending.result.result(30)
    train(again)
    assert again_select.graph is not None and again_select.graph.version == 2


def test_a_process_that_ends_in_the_middle_of_a_build_ends_well() -> None:
    script = """
import threading, numpy as np
from geartrain.ams.kernels import neighbours as ops
from geartrain.ams.values.errors import Cancelled
from geartrain.bridge.head.selection import graph_build
from tests.support.plain_graph import plain_build
from tests.unit.bridge.head.test_knn_softmax import KNNSoftmax, make_head, train

graph_build.build_graph = plain_build
head = make_head(KNNSoftmax(active=0.2, k=3, rebuild="background"))
train(head)
begun = threading.Event()

def build_until_cancelled(rows, k, progress, cancelled):
    while not cancelled():  # back and forth between compiled code and the interpreter
        ops.make_unit_rows(np.ones((1000, 100), np.float32), 2)
        begun.set()
    raise Cancelled("cancelled")

graph_build.build_graph = build_until_cancelled
head.next_epoch()
train(head)
assert begun.wait(30)
"""
    root = Path(__file__).parents[4]
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=root, timeout=120, check=False, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stderr) == (0, "")
