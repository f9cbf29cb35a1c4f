"""A publisher whose rows lie on ranks: all write, one of them removes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import geartrain as gt
from geartrain.workers.job import snapshots
from tests.support.published_training import LOOK, D, OneDirection
from tests.support.rank_processes import on_ranks


@on_ranks(2)
def test_old_versions_are_removed_by_one_rank_while_all_write(rank: int, folder: Path) -> None:
    for library in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(library, reason="needs pip install 'geartrain[onnx]'")
    removals = []
    with pytest.MonkeyPatch.context() as patch:
        real = snapshots.prune
        patch.setattr(snapshots, "prune", lambda *given, **named: removals.append(given) or real(*given, **named))
        head = gt.ClassHead(None, "classes", num_classes=4, dim=D, margin=None, rows="ranks")
        network = OneDirection()
        publisher = gt.Publisher(network, head, folder / "live", preprocessing=LOOK, keep=2)
        for step in range(5):
            publisher.publish(step, wait=True)
        torch.distributed.barrier()
    assert bool(removals) == (rank == 0)
    assert sorted(path.name for path in (folder / "live").glob("step-*")) == ["step-000000003", "step-000000004"]
