"""Classes chosen by tensor operations, as on a device: those that the C++ chooses, and no number is asked back."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.ams.graph.building.neighbours import NeighbourTable
from geartrain.ams.programs.class_lifecycle import LiveClasses
from geartrain.ams.programs.selection import FullSoftmax, PartialFC, positives_and_sample
from geartrain.ams.values.optimizers.registry import SparseMomentum
from geartrain.ams.values.specs import Normal
from geartrain.bridge.collectives.communicator import Communicator
from geartrain.bridge.head.backends.active_rows import DeviceActive, HostActive
from geartrain.bridge.head.backends.ranks import selector
from geartrain.bridge.head.backends.ranks.selector import LiveIds, RankSelector
from geartrain.bridge.head.loss.margins.angular import ArcFace
from geartrain.bridge.head.selection.graph_by_neighbour import OwnNeighbours
from geartrain.bridge.head.selection.knn_selection import KNNSelection, KNNSoftmax
from geartrain.bridge.head.selection.torch_selection import TorchGraph, near_on
from geartrain.bridge.kernels.sampling import filled_by_sample
from geartrain.bridge.placements.device_number import DeviceNumber
from geartrain.bridge.placements.device_rows import row_range
from geartrain.bridge.rows.optimizer import RowOptimizer
from tests.specification import ops as reference
from tests.support import heads
from tests.support.no_answers import NoAnswers
from tests.support.plain_graph import table_of
from tests.support.rank_processes import run_ranks

CPU = torch.device("cpu")
SEEDS = st.integers(-(2**63), 2**64 - 1)
STEPS = st.integers(0, 2**40)


@st.composite
def graphs(draw: st.DrawFn, num_classes: int) -> NeighbourTable:
    """Lists of any lengths, none or all empty among them; a class may come twice, or be in its own."""
    k = draw(st.integers(1, 6))
    lists = st.lists(st.integers(0, num_classes - 1), max_size=k)
    return table_of(draw(st.lists(lists, min_size=num_classes, max_size=num_classes)), k)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), num_classes=st.integers(2, 40), seed=SEEDS, step=STEPS)
def test_the_chosen_classes_are_those_of_the_specification(
    data: st.DataObject, num_classes: int, seed: int, step: int
) -> None:
    table = data.draw(graphs(num_classes))
    labels = np.array(data.draw(st.lists(st.integers(0, num_classes - 1), max_size=30)), np.int64)
    distinct = np.unique(labels)
    wanted = data.draw(st.integers(1, num_classes - 1))
    budget = max(wanted, len(distinct))
    if budget >= num_classes:
        return
    shuffled, graph = torch.from_numpy(np.roll(labels, 3)), TorchGraph.of(table, CPU)
    near = near_on(shuffled, graph, 1.0, budget)
    where: Any = {"start": 0, "stop": num_classes, "room": budget}
    found, count, _ = filled_by_sample(near, num_classes, budget, seed, step, **where)
    assert int(count) == budget
    np.testing.assert_array_equal(found.numpy(), table.select(labels, wanted, seed=seed, step=step))
    lists = (table.offsets, table.neighbours)
    np.testing.assert_array_equal(found.numpy(), reference.select_neighbours(*lists, labels, wanted, seed, step))


@settings(max_examples=150, deadline=None)
@given(data=st.data(), num_classes=st.integers(2, 40), near=st.floats(0, 1), step=STEPS)
def test_a_graph_cut_by_neighbour_chooses_what_the_whole_one_does(
    data: st.DataObject, num_classes: int, near: float, step: int
) -> None:
    table = data.draw(graphs(num_classes))
    labels = np.array(data.draw(st.lists(st.integers(0, num_classes - 1), max_size=30)), np.int64)
    distinct = np.unique(labels)
    budget = max(data.draw(st.integers(1, num_classes - 1)), len(distinct))
    if budget >= num_classes:
        return
    num_near = len(distinct) + round(near * (budget - len(distinct)))
    chosen = table.select(labels, num_near, seed=5, step=step) if num_near else labels
    expected = positives_and_sample(chosen, num_classes, budget, 5, step).ids
    own = OwnNeighbours.of(table, Communicator())
    np.testing.assert_array_equal(own.select(distinct, budget, near, 5, step).ids, expected)
    shuffled = torch.from_numpy(np.roll(labels, 3))
    where: Any = {"start": 0, "stop": num_classes, "room": budget}
    with NoAnswers():
        near_here = own.near(shuffled, near, budget)
        found = filled_by_sample(near_here.ids_M, num_classes, budget, 5, step, **where, limit=near_here.limit)
    np.testing.assert_array_equal(found.ids_A, expected)


def knn_of(table: NeighbourTable, budget: float, live: LiveClasses, seed: int) -> KNNSelection:
    """A selection that has this graph."""
    knn = KNNSelection(
        KNNSoftmax(budget, k=table.k, seed=seed, near=1.0),
        SimpleNamespace(spec=SimpleNamespace(num_rows=live.num_classes, name="t")),  # type: ignore[arg-type]
        None,
        lambda: 0,
    )
    knn.live_classes = live
    knn._install(table, 0)
    return knn


@settings(max_examples=80, deadline=None)
@given(data=st.data(), num_classes=st.integers(2, 40), world_size=st.integers(1, 4), step=STEPS)
def test_a_device_chooses_of_living_classes_what_the_host_does_on_every_rank(
    data: st.DataObject, num_classes: int, world_size: int, step: int
) -> None:
    retired = np.array(sorted(data.draw(st.sets(st.integers(0, num_classes - 1), max_size=num_classes - 1))), np.int64)
    live = LiveClasses(num_classes).without(retired)
    labels = np.array(data.draw(st.lists(st.sampled_from(live.all_ids.tolist()), max_size=20)), np.int64)
    share, seed = data.draw(st.floats(0.01, 1)), data.draw(st.integers(0, 2**64 - 1))
    for select in (
        FullSoftmax(),
        PartialFC(share, seed=seed),
        knn_of(data.draw(graphs(live.num_live_classes)), share, live, seed),
    ):
        for rank in range(world_size):
            first, stop = row_range(num_classes, world_size, rank)
            table: Any = SimpleNamespace(
                device=CPU,
                link=SimpleNamespace(world_size=world_size),
                first=first,
                stop=stop,
                num_local=stop - first,
                step=DeviceNumber(torch.int64),
            )
            selector = RankSelector(table, select)
            num_host, host = selector.choose(labels, live, step)
            enlarged = select.enlarged if isinstance(select, KNNSelection) else 0
            selector.on_device = True
            num_device, device = selector.choose(labels, live, step)
            assert isinstance(host, HostActive) and isinstance(device, DeviceActive)
            assert num_host == num_device and host.num <= device.num
            places = torch.from_numpy(labels - first)
            np.testing.assert_array_equal(device.targets(places).positions_B.numpy(), host.positions(labels - first))
            selector_of_device_labels(selector, labels, live, step, device)
            device = device.trimmed()
            assert host.num == device.num
            everything = torch.arange(stop - first)
            for item in (host.places(CPU).numbers_A, device.places(CPU).numbers_A):
                np.testing.assert_array_equal(everything if item is None else item, host_numbers(host))
            targets = device.targets(labels - first)
            np.testing.assert_array_equal(targets.positions_B.numpy(), host.positions(labels - first))
            if isinstance(select, KNNSelection):
                assert select.enlarged == 2 * enlarged
                select.enlarged = 0


def selector_of_device_labels(
    selector: RankSelector, labels: np.ndarray[Any, Any], live: LiveClasses, step: int, expected: DeviceActive
) -> None:
    """That labels on a device choose the same."""
    enlarged = getattr(selector._select, "enlarged", None)
    _, found = selector.choose(torch.from_numpy(labels), live, step)
    if enlarged is not None:
        selector._select.enlarged = enlarged  # type: ignore[attr-defined]
    assert isinstance(found, DeviceActive)
    for item in (found.trimmed(), expected.trimmed()):
        if item.numbers_A is None or expected.numbers_A is None:
            assert item.num == expected.trimmed().num
        else:
            np.testing.assert_array_equal(item.numbers_A, expected.trimmed().numbers_A)


def host_numbers(active: HostActive) -> np.ndarray[Any, Any]:
    return active.ids


def test_nothing_is_asked_of_the_device_between_labels_and_targets() -> None:
    random = np.random.default_rng(0)
    graph = NeighbourTable(np.arange(1001) * 5, random.integers(0, 1000, 5000), 5)
    live = LiveClasses(1010, [[300, 310]])
    labels = random.integers(0, 300, 64)
    everything = [FullSoftmax(), PartialFC(0.2), knn_of(graph, 0.2, live, 1)]
    for select, ranks, labels_B in itertools.product(everything, (1, 3), (labels, torch.from_numpy(labels))):
        first, stop = row_range(1010, ranks, ranks - 1)
        table: Any = SimpleNamespace(
            device=CPU,
            link=SimpleNamespace(world_size=ranks),
            first=first,
            stop=stop,
            num_local=stop - first,
            step=DeviceNumber(torch.int64),
        )
        selector = RankSelector(table, select)
        selector.on_device = True
        with NoAnswers():
            num, active = selector.choose(labels_B, live, 3)
            targets = active.targets(labels_B - first)
        assert isinstance(active, DeviceActive) and num == select.budget(1000)
        assert (ranks > 1 or active.num == num) and (active.count is None) == (ranks == 1 or num == 1000)
        assert isinstance(targets.positions_B, torch.Tensor)  # type: ignore[union-attr]
    with NoAnswers(), pytest.raises(AssertionError, match="waits for the device"):
        torch.arange(3).sum().item()


SELECTIONS = [FullSoftmax(), PartialFC(0.3, seed=4), KNNSoftmax(0.3, k=4, rebuild=2, seed=4, near=1.0)]


def train(select: Any, share: slice, *, on_device: bool) -> tuple[list[float], torch.Tensor]:
    """Losses and rows of some steps, one of them of two micro-batches, classes going meanwhile."""
    head = heads.make_head(
        on_device=on_device,
        num_classes=90,
        dim=8,
        select=select,
        margin=ArcFace(scale=8, margin=0.2),
        optimizer=SparseMomentum(lr=0.5, momentum=0.9),
        initializer=Normal(std=1.0),
    )
    rows, losses = RowOptimizer(head), []
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        if step == 2:
            head.retire_classes(torch.arange(40, 47))
        for _ in range(2 if step == 3 else 1):
            features = torch.randn(12, 8, generator=generator)[share].requires_grad_()
            labels = torch.randint(40, (12,), generator=generator)[share]
            loss = head(features, labels)
            loss.backward()
            assert features.grad is not None
            losses += [loss.item(), float(features.grad.abs().sum())]
        rows.step()
        rows.zero_grad()
    return losses, head.weights()


def train_on_ranks(rank: int, ranks: int, folder: Path) -> None:
    del ranks
    share = slice(0, 5) if rank == 0 else slice(5, 12)
    found = {
        f"{number}{on_device}": train(select, share, on_device=on_device)
        for number, select in enumerate(SELECTIONS)
        for on_device in (False, True)
    }
    torch.save(found, folder / f"{rank}.pt")


def require_equal(found: dict[str, tuple[list[float], torch.Tensor]]) -> None:
    for number in range(len(SELECTIONS)):
        (losses, weights), (expected_losses, expected) = found[f"{number}True"], found[f"{number}False"]
        assert losses == pytest.approx(expected_losses, rel=1e-4)
        torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-5)


def test_a_head_trains_alike_wherever_its_classes_are_chosen(tmp_path: Path) -> None:
    train_on_ranks(0, 1, tmp_path)
    require_equal(torch.load(tmp_path / "0.pt"))
    (tmp_path / "0.pt").unlink()
    run_ranks(train_on_ranks, 2, tmp_path)
    for rank in range(2):
        require_equal(torch.load(tmp_path / f"{rank}.pt"))


@pytest.mark.parametrize("num_retired", [0, 3])
def test_ids_of_living_classes_are_there_before_another_stream_reads_them(
    num_retired: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[torch.device] = []

    class Told:
        """Tells of waits."""

        def __init__(self, device: torch.device) -> None:
            self.wait = lambda: waits.append(device)

    monkeypatch.setattr(selector, "DeviceEvent", Told)
    LiveIds(LiveClasses.first(10, 10 - num_retired), torch.device("cpu"))
    assert len(waits) == bool(num_retired)
