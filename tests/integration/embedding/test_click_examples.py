"""The examples that train rows beside dense parts of three kinds, with fewer steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import train_with_attach
import train_with_ddp
import train_with_jax

import geartrain as gt
from tests.support.rank_processes import run_ranks

STEPS, AUC = 60, 0.7


def test_all_parameters_in_the_cluster() -> None:
    with gt.local(num_shards=2) as cluster:
        assert train_with_attach.train(cluster, STEPS) > AUC
        assert train_with_attach.train(cluster, 1) > AUC  # a second worker goes on with them


def test_a_network_in_jax() -> None:
    pytest.importorskip("jax", reason="JAX is not installed: pip install jax")
    with gt.local(num_shards=2) as cluster:
        assert train_with_jax.train(cluster, STEPS) > AUC
        assert train_with_jax.by_tables(cluster) >= 0


def train_a_rank(rank: int, ranks: int, folder: Path, address: str) -> None:
    (folder / f"auc{rank}").write_text(str(train_with_ddp.train(rank, ranks, address, STEPS)))


def test_ranks_with_a_joint_network_and_rows_of_their_own(served: Callable[..., Any], tmp_path: Path) -> None:
    run_ranks(train_a_rank, 2, tmp_path, served(2).address)
    assert [float((tmp_path / f"auc{rank}").read_text()) > AUC for rank in range(2)] == [True, True]
