"""Ranks that wait for the first one wait longer than the time limit of their process group."""

from __future__ import annotations

import datetime
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from geartrain.ams.errors import NonFinite, SyncError
from geartrain.bridge.heads import ranks as ranks_module
from geartrain.bridge.heads.ranks import Ranks
from tests.unit.bridge.rank_processes import run_ranks

LIMIT_SECONDS = 2.0


def work_long(rank: int, num_ranks: int, folder: Path) -> None:
    ranks_module.TELL_SECONDS = 0.2
    group = dist.new_group(list(range(num_ranks)), timeout=datetime.timedelta(seconds=LIMIT_SECONDS))
    ranks = Ranks("job", group)

    def build() -> str:
        threading.Event().wait(1.5 * LIMIT_SECONDS)
        (folder / "built").touch()
        return "built here"

    def take() -> str:
        return "built there" if (folder / "built").exists() else "too early"

    assert ranks.first_then_others(build, take) == ("built here", "built there")[min(rank, 1)]

    def fail() -> str:
        threading.Event().wait(0.5)
        raise NonFinite("row 7")

    with pytest.raises(NonFinite if rank == 0 else SyncError):
        ranks.first_then_others(fail, take)
    assert ranks.agree(rank == 0)  # all of them are at the same collective again


def test_the_others_wait_longer_than_the_limit_of_their_group_and_hear_of_a_failure(tmp_path: Path) -> None:
    run_ranks(work_long, 3, tmp_path)
