"""The graph of rows on ranks: built on the ring it is the graph of the rows put together."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import geartrain as gt
from geartrain.ams.graph.building.neighbours import NeighbourTable
from geartrain.ams.graph.building.rows import Floats
from geartrain.ams.programs.class_lifecycle import LiveClasses
from geartrain.ams.programs.selection import positives_and_sample
from geartrain.ams.values.errors import Cancelled, InvalidArgument, NonFinite, SyncError
from geartrain.ams.values.optimizers.registry import SparseMomentum
from geartrain.ams.values.specs import Normal
from geartrain.bridge.collectives.communicator import Communicator
from geartrain.bridge.head.class_head import ClassHead
from geartrain.bridge.head.loss.margins.angular import ArcFace
from geartrain.bridge.head.selection import rank_ring
from geartrain.bridge.head.selection.graph_by_list import GraphParts, lists_by_class, table_of_lists
from geartrain.bridge.head.selection.graph_by_neighbour import OwnNeighbours
from geartrain.bridge.head.selection.graph_products import TorchProducts
from geartrain.bridge.head.selection.knn_selection import KNNSelection, KNNSoftmax
from geartrain.bridge.head.selection.rank_graph import RankGraphs
from geartrain.bridge.head.selection.rank_ring import build_on_ring
from geartrain.bridge.kernels.sampling import filled_by_sample
from geartrain.bridge.rows.serialization import state_from_bytes, state_to_bytes
from tests.specification import ops as reference
from tests.support import heads
from tests.support.plain_graph import table_of
from tests.support.rank_processes import on_ranks, run_ranks
from tests.unit.bridge.head.test_graph_products import rows_of

SHARES = [[40, 41, 39], [0, 1, 119], [70, 0, 50]]


def share_of(rows: Floats, sizes: list[int], rank: int) -> Floats:
    first = sum(sizes[:rank])
    return np.array(rows[first : first + sizes[rank]])


def build_graphs(rank: int, ranks: int, folder: Path) -> None:
    rank_ring._BLOCK_ROWS = 16  # several blocks a rank
    link, rows = Communicator().apart(), rows_of(120, 12)
    lists, sent = [], []
    for sizes in SHARES if ranks == 3 else [[75, 45]]:
        for products, memory, raw in (
            (None, 1 << 30, None),
            (None, 1, None),
            (TorchProducts("cpu"), 1 << 30, None),
            (TorchProducts("cpu"), 1, None),  # some ranks recall while others ask for exact rows
            (TorchProducts("cpu"), 1, torch.bfloat16),
            (None, 1 << 30, torch.bfloat16),
        ):
            own, raw_rows, carrier = share_of(rows, sizes, rank), None, Communicator()
            if raw is not None:
                raw_rows = torch.from_numpy(own).to(raw)
                own = raw_rows.float().numpy()
            told: list[tuple[int, int]] = []

            def tell(done: int, total: int, told: list[tuple[int, int]] = told) -> None:
                told.append((done, total))

            table = build_on_ring(
                link, own, 5, products=products, raw_LD=raw_rows, carrier=carrier, memory_bytes=memory, progress=tell
            )
            assert not told or told[-1] == (len(own) * 120, len(own) * 120)
            assert (table.first, table.num_lists, table.num_classes) == (sum(sizes[:rank]), len(own), 120)
            whole = GraphParts(link, 0, 0).whole(table)
            assert (whole is None) == (rank > 0)
            lists += [] if whole is None else [whole.neighbours.reshape(120, 5)]
    if ranks == 3:
        bfloats = torch.randn(120, 12, generator=torch.Generator().manual_seed(1))[
            40 * rank : 40 * rank + 40
        ].bfloat16()
        for raw_rows in (None, bfloats):
            carrier = Communicator()
            build_on_ring(link, bfloats.float().numpy(), 5, raw_LD=raw_rows, carrier=carrier)
            sent.append(carrier.traffic.bytes["send"])
        assert sent[0] == 2 * sent[1] == 2 * 80 * 12 * 4  # a lap of recall, and one of exact scores
    sizes = [1] * ranks if ranks == 3 else [2, 1]
    more = build_on_ring(link, share_of(rows[:3], sizes, rank), 9)
    assert (more.k, len(more.neighbours)) == (9, 2 * sizes[rank])  # a class has at most C - 1
    alone = build_on_ring(link, share_of(rows, [1] + [0] * (ranks - 1), rank), 2)
    assert (alone.num_classes, len(alone.neighbours)) == (1, 0)
    if rank == 0:
        np.save(folder / f"{ranks}.npy", np.stack(lists))


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_ring_builds_the_graph_of_the_rows_put_together(ranks: int, tmp_path: Path) -> None:
    run_ranks(build_graphs, ranks, tmp_path)
    rows = rows_of(120, 12)
    expected = reference.nearest_neighbours(rows, 5)
    expected_of_raw = reference.nearest_neighbours(torch.from_numpy(rows).bfloat16().float().numpy(), 5)
    found = np.load(tmp_path / f"{ranks}.npy")
    assert len(found) == 6 * (len(SHARES) if ranks == 3 else 1)
    for number, lists in enumerate(found):
        np.testing.assert_array_equal(lists, expected if number % 6 < 4 else expected_of_raw)


@on_ranks(2)
def test_what_ends_one_rank_ends_all(rank: int) -> None:
    link, rows = Communicator().apart(), rows_of(60, 8)
    bad = rows.copy()
    bad[45, 3] = np.nan
    with pytest.raises(NonFinite if rank == 1 else SyncError, match="class 45" if rank == 1 else "rank 1"):
        build_on_ring(link, share_of(bad, [30, 30], rank), 4)
    asked = 0

    def cancelled() -> bool:
        nonlocal asked
        asked += 1
        return rank == 0 and asked == 2

    with pytest.raises(Cancelled if rank == 0 else SyncError):
        build_on_ring(link, share_of(rows, [30, 30], rank), 4, cancelled=cancelled)
    with pytest.raises(InvalidArgument, match="k is 0"):
        build_on_ring(link, rows, 0)
    table = build_on_ring(link, share_of(rows, [30, 30], rank), 4)  # the ranks are in step still
    expected = reference.nearest_neighbours(rows, 4)[30 * rank : 30 * rank + 30]
    np.testing.assert_array_equal(table.neighbours.reshape(30, 4), expected)
    dist.barrier()


CLASSES, DIM, BATCH = 61, 8, 12


def knn_head(rebuild: int | str = "epoch", **more: Any) -> tuple[ClassHead, KNNSelection]:
    select = KNNSoftmax(active=0.2, k=3, rebuild=rebuild, near=1.0)
    settings: dict[str, Any] = {"margin": ArcFace(scale=64), "optimizer": SparseMomentum(0.1), "initializer": Normal()}
    settings |= {"num_classes": CLASSES, "dim": DIM, "rows": "ranks", "seed": 3, **more}
    head = heads.make_head(None, "faces", select=select, **settings)
    assert isinstance(head.select, KNNSelection)
    return head, head.select


def train(head: ClassHead, steps: range, rank: int, ranks: int) -> list[float]:
    return heads.train(head, steps, rank, ranks, batch=partial(heads.living_batch, head, BATCH))


def build_in_the_background(rank: int, ranks: int, folder: Path) -> None:
    head, select = knn_head("background")
    head.eval()
    with pytest.raises(InvalidArgument, match="ranks build it together"):
        head(torch.zeros(1, DIM), torch.tensor([rank]))
    head.train()
    train(head, range(3), rank, ranks)
    head.next_epoch()
    train(head, range(3, 4), rank, ranks)  # begins at step 3
    assert select._pending is not None
    select._pending.result.result(60)
    train(head, range(4, 5), rank, ranks)  # takes it up
    assert select.graph is not None
    assert (select.graph.version, select.graph.step, select.graph_age) == (2, 3, 2)
    np.save(folder / f"neighbours-{rank}.npy", select.graph.table.neighbours)
    head.next_epoch()
    train(head, range(5, 6), rank, ranks)
    select.cancel()
    head.rebuild_graph()
    assert (select.graph.version, select.graph_age) == (3, 0)
    assert isinstance(select._source, RankGraphs)
    some = np.setdiff1d(np.arange(CLASSES), [0, 7, 30, 31])
    table = select._source.freeze(some).build(3, None, lambda: False)
    nearest = reference.nearest_neighbours(head.weights(torch.from_numpy(some)).numpy(), 3)
    first = table.first
    np.testing.assert_array_equal(table.neighbours.reshape(-1, 3), nearest[first : first + table.num_lists])
    head.eval()
    assert torch.isfinite(head(torch.ones(1, DIM), torch.tensor([rank])))


def test_ranks_build_beside_the_training_from_rows_of_one_moment(tmp_path: Path) -> None:
    run_ranks(build_in_the_background, 2, tmp_path)
    head, _ = knn_head("background")
    train(head, range(3), 0, 1)
    expected = reference.nearest_neighbours(head.weights().numpy(), 3).reshape(-1)
    parts = [np.load(tmp_path / f"neighbours-{rank}.npy") for rank in range(2)]
    assert [len(part) for part in parts] == [93, 90]  # each has the lists of its own 31 and 30 classes
    np.testing.assert_array_equal(np.concatenate(parts), expected)


def train_leg(rank: int, ranks: int, folder: Path, leg: int, steps: range) -> None:
    head, select = knn_head()
    if leg:
        snapshot = head.restore(folder / f"leg{leg - 1}")
        files = snapshot.job_files()
        select.graph_from_bytes(files["graph"])
        head.load_state_dict(state_from_bytes(files["head"]))
    np.save(folder / f"losses{leg}-{rank}.npy", train(head, steps, rank, ranks))
    graph = select.graph_to_bytes()
    assert graph is not None
    head.snapshot(folder, f"leg{leg}", files={"head": state_to_bytes(head.state_dict()), "graph": graph})


def test_a_graph_goes_on_with_its_rows_on_another_number_of_ranks(tmp_path: Path) -> None:
    run_ranks(train_leg, 2, tmp_path, 0, range(3))
    run_ranks(train_leg, 3, tmp_path, 1, range(3, 6))
    resumed = [
        sum(np.load(tmp_path / f"losses{leg}-{rank}.npy") for rank in range(ranks)) for leg, ranks in ((0, 2), (1, 3))
    ]
    head, select = knn_head()
    np.testing.assert_allclose(np.concatenate(resumed), train(head, range(6), 0, 1), rtol=2e-6)
    assert select.graph is not None and select.graph.step == 0


def select_of_parts(rank: int, ranks: int, folder: Path) -> None:
    """Lists of any lengths, none among them, a class twice, other live classes."""
    del folder
    random, link = np.random.default_rng(7), Communicator()
    for case in range(40):
        num = int(random.integers(5, 60))
        live = LiveClasses(num).without(np.flatnonzero(random.random(num) < 0.3 * (case % 2))[: num - 3])
        lists = [
            random.integers(0, live.num_live_classes, random.integers(0, 6)).tolist()
            for _ in range(live.num_live_classes)
        ]
        whole = table_of(lists, 5)
        bounds = np.sort(random.integers(0, num + 1, ranks - 1)).tolist()
        parts = GraphParts(link, [0, *bounds][rank], [*bounds, num][rank])
        part = parts.cut(whole, live)
        labels = random.integers(0, live.num_live_classes, random.integers(0, 9))
        distinct, near = np.unique(labels), float(random.choice([0, 0.125, 0.5, 1]))
        budget = max(int(random.integers(1, live.num_live_classes + 1)), len(distinct))
        num_near = len(distinct) + round(near * (budget - len(distinct)))
        chosen = positives_and_sample(
            whole.select(labels, num_near, seed=3, step=case) if num_near else labels,
            live.num_live_classes,
            budget,
            3,
            case,
        ).ids
        own = OwnNeighbours.of(part, link)
        (first, stop), total = parts.bounds(live), live.num_live_classes
        expected = chosen[(chosen >= first) & (chosen < stop)]
        active = own.select(distinct, budget, near, 3, case)
        assert active.num == budget
        np.testing.assert_array_equal(active.ids if len(active.ids) else [], expected)
        of_step = own.near(torch.from_numpy(labels), near, budget)
        where: Any = {"start": first, "stop": stop, "room": budget, "limit": of_step.limit}
        sample = filled_by_sample(of_step.ids_M, total, budget, 3, case, **where)
        np.testing.assert_array_equal(sample.ids_A[: int(sample.num)] + first, expected)
        together = parts.whole(part)
        if rank == 0:
            assert together is not None and together.total is None
            np.testing.assert_array_equal(together.offsets, whole.offsets)
            np.testing.assert_array_equal(together.neighbours, whole.neighbours)
    with pytest.raises(InvalidArgument, match="select needs all"):
        part.select(labels, 3, seed=0, step=0)


@pytest.mark.parametrize("ranks", [2, 3])
def test_parts_of_a_graph_choose_the_classes_of_the_whole(ranks: int, tmp_path: Path) -> None:
    run_ranks(select_of_parts, ranks, tmp_path)


@on_ranks(2, 3)
def test_a_step_sends_counts_of_at_most_8_k_bytes(rank: int, ranks: int) -> None:
    random, link = np.random.default_rng(1), Communicator()
    for num, k, batch, budget, near in (
        (2_000, 8, 64, 200, 1.0),
        (2_000, 8, 64, 1_500, 0.125),
        (20_000, 32, 1_024, 9_000, 1.0),
        (20_000, 100, 4_096, 18_000, 0.5),
    ):
        lists = random.integers(0, num, num * k, dtype=np.int32)
        whole = NeighbourTable(np.arange(num + 1) * k, lists, k)
        part = whole.part(num * rank // ranks, num * (rank + 1) // ranks)
        own, labels = OwnNeighbours.of(part, link), np.unique(random.integers(0, num, batch))
        link.traffic.clear()
        active = own.select(labels, budget, near, 5, 6)
        assert sum(link.traffic.bytes.values()) <= 8 * k, link.traffic
        assert sum(link.traffic.calls.values()) <= 10
        num_near = len(labels) + round(near * (budget - len(labels)))
        ids = whole.select(labels, num_near, seed=5, step=6)
        chosen = positives_and_sample(ids, num, budget, 5, 6).ids
        np.testing.assert_array_equal(active.sorted_ids, chosen[(chosen >= part.first) & (chosen < own.stop)])


# A cut graph is saved in parts: no rank has the whole, and any number of ranks loads it.


class Faces(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.select = knn_head(num_live_classes=58)


def save_in_parts(rank: int, ranks: int, folder: Path) -> None:
    GraphParts.whole = None  # type: ignore[assignment, method-assign]
    model, link = Faces(), Communicator()
    train_more(model.head, rank, ranks)
    model.head.retire_classes(torch.tensor([20, 33]))
    graph = model.select.graph
    assert graph is not None
    lists = np.concatenate(
        [np.frombuffer(part, np.int32) for part in link.gather_bytes(graph.table.neighbours.tobytes())]
    )
    lengths = [np.frombuffer(part, np.int64) for part in link.gather_bytes(np.diff(graph.table.offsets).tobytes())]
    if rank == 0:
        np.save(folder / "lists.npy", lists)
        np.save(folder / "lengths.npy", np.concatenate(lengths))
    gt.save(model, folder / "model")
    dcp.save({"rows": model.head.sharded_rows()}, checkpoint_id=folder / "dcp")
    np.save(folder / f"losses-{rank}.npy", train_more(model.head, rank, ranks))


def load_parts(rank: int, ranks: int, folder: Path) -> None:
    link = Communicator()
    for saved in sorted(folder.glob("saved-*")):
        lists, offsets = np.load(saved / "lists.npy"), np.append(0, np.cumsum(np.load(saved / "lengths.npy")))
        expected = NeighbourTable(offsets, lists, 3)
        for kind in ("model", "dcp"):
            model = Faces()
            if kind == "model":
                gt.load(model, saved / "model")
            else:
                dcp.load({"rows": model.head.sharded_rows()}, checkpoint_id=saved / "dcp")
            graph = model.select.graph
            assert graph is not None and (graph.version, graph.step) == (2, 0)
            mine = graph.table
            own = expected if ranks == 1 else expected.part(mine.first, mine.first + mine.num_lists)
            assert (mine.first, mine.total, mine.k) == (own.first, own.total, 3)
            np.testing.assert_array_equal(mine.offsets, own.offsets)
            np.testing.assert_array_equal(mine.neighbours, own.neighbours)
            if kind == "dcp":
                continue
            own_loss = np.sum(train_more(model.head, rank, ranks))
            joint = link.sum(torch.tensor([own_loss], dtype=torch.float64)).item()
            before = sum(np.load(path).sum() for path in saved.glob("losses-*.npy"))
            assert joint == pytest.approx(before, rel=1e-5)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_graph_saved_in_parts_is_loaded_by_any_number_of_ranks(tmp_path: Path) -> None:
    for ranks in (1, 2, 3):
        (tmp_path / f"saved-{ranks}").mkdir()
        run_ranks(save_in_parts, ranks, tmp_path / f"saved-{ranks}")
    for ranks in (1, 2, 3):
        run_ranks(load_parts, ranks, tmp_path)


def test_lists_by_class_are_the_table_again_whatever_lives() -> None:
    random = np.random.default_rng(3)
    for num in (1, 7, 40):
        live = LiveClasses(num).without(np.flatnonzero(random.random(num) < 0.3)[: num - 1])
        own = [
            random.integers(0, live.num_live_classes, random.integers(0, 5)).tolist()
            for _ in range(live.num_live_classes)
        ]
        table = table_of(own, 4)
        lists = lists_by_class(table, live, range(num), 4)
        assert lists.shape == (num, 4)
        for first, stop in ((0, num), (num // 3, num - num // 4), (num, num)):
            classes = range(first, stop)
            part = table_of_lists(lists[first:stop], live, classes, 4, is_part=True)
            expected = table.part(live.num_below(first), live.num_below(stop))
            np.testing.assert_array_equal(part.offsets, expected.offsets)
            np.testing.assert_array_equal(part.neighbours, expected.neighbours)
            assert (part.first, part.total, part.k) == (expected.first, expected.total, 4)
        assert (lists_by_class(None, live, range(num), 4) == -1).all()


# Classes come and go: the graph is of the live ones, whatever the number of ranks.


def train_more(head: ClassHead, rank: int, ranks: int) -> list[float]:
    return train(head, range(head.step, head.step + 3), rank, ranks)


def changes(rank: int, ranks: int, folder: Path) -> None:
    head, select = knn_head(num_live_classes=58)
    losses = train_more(head, rank, ranks)
    head.retire_classes(torch.tensor([0, 1, 20, 33, 34]))
    losses += train_more(head, rank, ranks)
    assert select.graph is not None
    assert select.graph.version == 2  # followed, not built anew
    rows = torch.randn(3, DIM, generator=torch.Generator().manual_seed(9))
    assert head.add_classes(3, rows=rows).tolist() == [0, 1, 20]
    losses += train_more(head, rank, ranks)
    head.rebuild_graph()
    expected = reference.nearest_neighbours(
        head.weights(torch.from_numpy(head._backend.live_classes.all_ids)).numpy(), 3
    )
    part = select.graph.table
    expected = expected[part.first : part.first + part.num_lists]
    np.testing.assert_array_equal(part.neighbours.reshape(-1, 3), expected)
    graph = select.graph_to_bytes()
    assert graph is not None
    losses += train_more(head, rank, ranks)
    path = head.snapshot(folder, f"{ranks}", files={"head": state_to_bytes(head.state_dict()), "graph": graph})
    again, selection = knn_head(num_live_classes=58)
    files = again.restore(path).job_files()
    selection.graph_from_bytes(files["graph"])
    again.load_state_dict(state_from_bytes(files["head"]))
    assert (again.num_live_classes, again.step) == (head.num_live_classes, head.step)
    assert train_more(again, rank, ranks) == train_more(head, rank, ranks)
    np.save(folder / f"losses-{ranks}-{rank}.npy", losses)


def test_the_graph_of_ranks_follows_classes_that_come_and_go(tmp_path: Path) -> None:
    assert Communicator().world_size == 1
    changes(0, 1, tmp_path)
    alone = np.load(tmp_path / "losses-1-0.npy")
    for ranks in (2, 3):
        run_ranks(changes, ranks, tmp_path)
        joint = sum(np.load(tmp_path / f"losses-{ranks}-{rank}.npy") for rank in range(ranks))
        np.testing.assert_allclose(joint, alone, rtol=5e-6)
