"""What a job says of the processes that it consists of."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from geartrain.ams.values.errors import ConfigError
from geartrain.bridge.collectives.scheduler_store import VARIABLE
from geartrain.workers.job.job import _agreed
from geartrain.workers.job.options import JobOptions, JobResult
from geartrain.workers.job.ranks import JobRanks, joined_ranks


def test_a_command_to_go_on_starts_as_many_processes_on_each_machine() -> None:
    assert JobRanks().launcher == ""
    ranks = JobRanks(local_world_size=2)
    ranks.world_size = 8
    assert ranks.launcher == "torchrun --nproc-per-node 2 -m "
    ranks.world_size = 2
    assert ranks.launcher == "torchrun --rdzv-backend loopback --nproc-per-node 2 -m "


def test_a_command_to_go_on_lets_the_machines_meet_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "10.0.0.1:7000/ads/3")
    ranks = JobRanks(local_world_size=2)
    ranks.world_size = 8
    by_scheduler = "--rdzv-backend geartrain --rdzv-endpoint 10.0.0.1:7000 --rdzv-id ads/3 --nnodes 4"
    assert ranks.launcher == f"torchrun {by_scheduler} --nproc-per-node 2 -m "


def listening(address: str, monkeypatch: pytest.MonkeyPatch) -> socket.socket:
    """A listener in the place of torchrun's store, as the only rank of a job is told of it."""
    listener = socket.create_server((address, 0))
    monkeypatch.setenv("MASTER_PORT", str(listener.getsockname()[1]))
    monkeypatch.setenv("WORLD_SIZE", "1")
    return listener


def test_ranks_do_not_train_where_other_machines_reach_their_store(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = [item for found in psutil.net_if_addrs().values() for item in found if item.family == socket.AF_INET]
    if all(address.address.startswith("127.") for address in addresses):
        pytest.skip("this machine has no address but loopback")
    with listening("127.0.0.1", monkeypatch), joined_ranks("cpu") as ranks:
        assert ranks.world_size == 1
    with listening("0.0.0.0", monkeypatch):
        with pytest.raises(ConfigError, match=r"runs code .* 'torchrun --rdzv-backend loopback"), joined_ranks("cpu"):
            pass
        monkeypatch.setenv("INSECURE", "1")
        with joined_ranks("cpu"):
            pass


def test_ranks_of_several_machines_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": 0, "WORLD_SIZE": 4, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    said = r"several machines.*--rdzv-backend geartrain --rdzv-endpoint SCHEDULER.*INSECURE=1"
    with pytest.raises(ConfigError, match=said), joined_ranks("cpu"):
        pass


class Told(JobRanks):
    """The first of several ranks, of which it is known what the others say."""

    def __init__(self, *others: object) -> None:
        super().__init__()
        self._others = others

    def gather_json(self, value: Any) -> list[Any]:
        return [value, *self._others]


def test_ranks_with_folders_of_their_own_agree_on_the_run_or_end(tmp_path: Path) -> None:
    # Else some train and others restore or are done, and all wait for each other in other collectives.
    begins = JobOptions(job="ctr", out=tmp_path, recipe=None, continues=True)
    goes_on = replace(begins, resume=True)
    assert _agreed(begins, Told([False, None]), None) is None
    assert _agreed(goes_on, Told([True, None]), None) is None
    for options, other in ((begins, [True, None]), (goes_on, [False, None])):
        with pytest.raises(ConfigError, match=r"rank \d finds no run in .* --snapshots, or an --out, that all"):
            _agreed(options, Told(other), None)
    assert _agreed(begins, Told([True, 30]), None) == JobResult(True, None, 30)
