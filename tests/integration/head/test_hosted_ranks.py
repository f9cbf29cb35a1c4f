"""Ranks that train together on rows in a served cluster, pulled and hosted, against the float64 reference.

Ranks are real processes (gloo) with uneven batches, one of them empty; the cluster has two shards behind sockets.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from geartrain.ams.client.factory import connect
from tests.integration.conftest import ServedCluster
from tests.support.rank_processes import run_ranks
from tests.unit.bridge.head.test_places import (
    RANKS,
    Array,
    Case,
    joined,
    make_head,
    reference,
    require_close,
    train_share,
)

CASES: list[Case] = [
    ("full", "arcface", "nesterov"),
    ("partial", "cosface", "sparse"),
    ("partial", "combined", "sparse"),
    ("full", "none", "sparse"),
]


def train_rank(rank: int, ranks: int, folder: Path, place: str, address: str) -> None:
    arrays: dict[str, Array] = {}
    with connect(address) as cluster:
        for case in CASES:
            head = make_head(cluster, case, place, sync=True)
            for step, (loss, gradient) in enumerate(train_share(head, rank, ranks)):
                arrays[f"{case}/{step}/loss"], arrays[f"{case}/{step}/gradient"] = np.array(loss), gradient
            dist.barrier()  # no rank reads the rows before the last update of all
            arrays[f"{case}/rows"] = head.weights().numpy()
        dist.barrier()
    np.savez(folder / f"rank{rank}.npz", **arrays)


@pytest.mark.parametrize("place", ["hosted", pytest.param("pull", marks=pytest.mark.slow)])
def test_ranks_on_served_shards_equal_the_float64_reference(place: str, tmp_path: Path) -> None:
    served = ServedCluster(2)
    try:
        run_ranks(train_rank, RANKS, tmp_path, place, served.address)
    finally:
        served.stop()
    parts = [np.load(tmp_path / f"rank{rank}.npz") for rank in range(RANKS)]
    for case in CASES:
        truth = reference(case)
        steps = range(len(truth.losses))
        said = [[(float(part[f"{case}/{i}/loss"]), part[f"{case}/{i}/gradient"]) for i in steps] for part in parts]
        require_close(joined(said, RANKS, parts[0][f"{case}/rows"]), truth, case)
