"""Classes come and go on ranks that select by a graph: it is of the living ones, whatever the number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from geartrain.ams.kernels.reference import ops as reference
from geartrain.ams.values.optimizers.registry import SparseMomentum
from geartrain.ams.values.specs import Normal
from geartrain.bridge.collectives.communicator import Communicator
from geartrain.bridge.head.class_head import ClassHead
from geartrain.bridge.head.loss.margins.angular import ArcFace
from geartrain.bridge.head.selection.knn_selection import KNNSelection, KNNSoftmax
from geartrain.bridge.rows.optimizer import RowOptimizer
from geartrain.bridge.rows.state import state_from_bytes, state_to_bytes
from tests.support.head_settings import head_settings
from tests.support.rank_processes import run_ranks

CLASSES, DIM, BATCH = 61, 8, 12
GONE = torch.tensor([0, 1, 20, 33, 34, 60])


def make_head() -> tuple[ClassHead, KNNSelection]:
    select = KNNSoftmax(active=0.2, k=3, rebuild="epoch", near=1.0)
    settings: dict[str, Any] = {"margin": ArcFace(scale=64), "optimizer": SparseMomentum(0.1), "initializer": Normal()}
    sizes = {"num_classes": CLASSES, "dim": DIM, "num_living": 58}
    head = ClassHead(None, "faces", **head_settings(select=select, rows="ranks", seed=3, **sizes, **settings))
    assert isinstance(head.select, KNNSelection)
    return head, head.select


def train(head: ClassHead, rank: int, ranks: int) -> list[float]:
    rows, losses = RowOptimizer(head), []
    living = np.setdiff1d(np.arange(CLASSES), head.retired.numpy())
    share = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
    for _ in range(3):
        generator = torch.Generator().manual_seed(head.step)
        features = torch.randn(BATCH, DIM, generator=generator)
        labels = torch.from_numpy(living)[torch.randint(len(living), (BATCH,), generator=generator)]
        loss = head(features[share], labels[share])
        loss.backward()
        rows.step()
        losses.append(float(loss.detach()) * len(features[share]) / BATCH)
    return losses


def changes(rank: int, ranks: int, folder: Path) -> None:
    head, select = make_head()
    losses = train(head, rank, ranks)
    head.retire_classes(GONE[:-1])
    losses += train(head, rank, ranks)
    assert select.graph is not None
    assert select.graph.version == 2  # followed, not built anew
    rows = torch.randn(3, DIM, generator=torch.Generator().manual_seed(9))
    assert head.add_classes(3, rows=rows).tolist() == [0, 1, 20]
    losses += train(head, rank, ranks)
    head.rebuild_graph()
    expected = reference.nearest_neighbours(head.weights(torch.from_numpy(head._backend.living.all_ids)).numpy(), 3)
    np.testing.assert_array_equal(select.graph.table.neighbours.reshape(-1, 3), expected)
    graph = select.graph_to_bytes()
    assert graph is not None
    losses += train(head, rank, ranks)
    path = head.snapshot(folder, f"{ranks}", files={"head": state_to_bytes(head.state_dict()), "graph": graph})
    again, selection = make_head()
    files = again.restore(path).job_files()
    selection.graph_from_bytes(files["graph"])
    again.load_state_dict(state_from_bytes(files["head"]))
    assert (again.num_living, again.step) == (head.num_living, head.step)
    assert train(again, rank, ranks) == train(head, rank, ranks)
    np.save(folder / f"losses-{ranks}-{rank}.npy", losses)


def test_the_graph_of_ranks_follows_classes_that_come_and_go(tmp_path: Path) -> None:
    assert Communicator().world_size == 1
    changes(0, 1, tmp_path)
    alone = np.load(tmp_path / "losses-1-0.npy")
    for ranks in (2, 3):
        run_ranks(changes, ranks, tmp_path)
        joint = sum(np.load(tmp_path / f"losses-{ranks}-{rank}.npy") for rank in range(ranks))
        np.testing.assert_allclose(joint, alone, rtol=5e-6)
