"""The graph of rows on ranks: built on the ring it is the graph of the rows put together."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from geartrain.ams.graph.building.rows import Floats
from geartrain.ams.kernels.reference import ops as reference
from geartrain.ams.values.errors import Cancelled, InvalidArgument, NonFinite, SyncError
from geartrain.ams.values.optimizers.registry import SparseMomentum
from geartrain.ams.values.specs import Normal
from geartrain.bridge.collectives.communicator import Communicator
from geartrain.bridge.head.class_head import ClassHead
from geartrain.bridge.head.loss.margins.angular import ArcFace
from geartrain.bridge.head.selection import rank_ring
from geartrain.bridge.head.selection.graph_products import TorchProducts
from geartrain.bridge.head.selection.knn_selection import KNNSelection, KNNSoftmax
from geartrain.bridge.head.selection.rank_graph import RankGraphs
from geartrain.bridge.head.selection.rank_ring import build_on_ring
from geartrain.bridge.rows.state import state_from_bytes, state_to_bytes
from tests.support import heads
from tests.support.rank_processes import on_ranks, run_ranks
from tests.unit.bridge.head.test_graph_products import rows_of

SHARES = [[40, 41, 39], [0, 1, 119], [70, 0, 50]]


def share_of(rows: Floats, sizes: list[int], rank: int) -> Floats:
    first = sum(sizes[:rank])
    return np.array(rows[first : first + sizes[rank]])


def build_graphs(rank: int, ranks: int, folder: Path) -> None:
    rank_ring._BLOCK_ROWS = 16  # several blocks a rank
    link, rows = Communicator().apart(), rows_of(120, 12)
    lists = []
    for sizes in SHARES if ranks == 3 else [[75, 45]]:
        for products, memory in ((None, 1 << 30), (None, 1), (TorchProducts("cpu"), 1 << 30)):
            own = share_of(rows, sizes, rank)
            told: list[tuple[int, int]] = []

            def tell(done: int, total: int, told: list[tuple[int, int]] = told) -> None:
                told.append((done, total))

            table = build_on_ring(link, own, 5, products=products, memory_bytes=memory, progress=tell)
            assert not told or told[-1] == (len(own) * 120, len(own) * 120)
            lists.append(table.neighbours.reshape(120, 5))
    more = build_on_ring(link, share_of(rows[:3], [1] * ranks if ranks == 3 else [2, 1], rank), 9)
    assert (more.k, more.neighbours.shape) == (9, (6,))  # a class has at most C - 1
    alone = build_on_ring(link, share_of(rows, [1] + [0] * (ranks - 1), rank), 2)
    assert (alone.num_classes, len(alone.neighbours)) == (1, 0)
    np.save(folder / f"{ranks}-{rank}.npy", np.stack(lists))


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_ring_builds_the_graph_of_the_rows_put_together(ranks: int, tmp_path: Path) -> None:
    run_ranks(build_graphs, ranks, tmp_path)
    expected = reference.nearest_neighbours(rows_of(120, 12), 5)
    for rank in range(ranks):
        for lists in np.load(tmp_path / f"{ranks}-{rank}.npy"):
            np.testing.assert_array_equal(lists, expected)


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
    np.testing.assert_array_equal(table.neighbours.reshape(60, 4), reference.nearest_neighbours(rows, 4))
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
    np.testing.assert_array_equal(table.neighbours.reshape(-1, 3), nearest)
    head.eval()
    assert torch.isfinite(head(torch.ones(1, DIM), torch.tensor([rank])))


def test_ranks_build_beside_the_training_from_rows_of_one_moment(tmp_path: Path) -> None:
    run_ranks(build_in_the_background, 2, tmp_path)
    head, _ = knn_head("background")
    train(head, range(3), 0, 1)
    expected = reference.nearest_neighbours(head.weights().numpy(), 3).reshape(-1)
    for rank in range(2):
        np.testing.assert_array_equal(np.load(tmp_path / f"neighbours-{rank}.npy"), expected)


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


# Classes come and go: the graph is of the living ones, whatever the number of ranks.


def train_more(head: ClassHead, rank: int, ranks: int) -> list[float]:
    return train(head, range(head.step, head.step + 3), rank, ranks)


def changes(rank: int, ranks: int, folder: Path) -> None:
    head, select = knn_head(num_living=58)
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
    np.testing.assert_array_equal(select.graph.table.neighbours.reshape(-1, 3), expected)
    graph = select.graph_to_bytes()
    assert graph is not None
    losses += train_more(head, rank, ranks)
    path = head.snapshot(folder, f"{ranks}", files={"head": state_to_bytes(head.state_dict()), "graph": graph})
    again, selection = knn_head(num_living=58)
    files = again.restore(path).job_files()
    selection.graph_from_bytes(files["graph"])
    again.load_state_dict(state_from_bytes(files["head"]))
    assert (again.num_living, again.step) == (head.num_living, head.step)
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
