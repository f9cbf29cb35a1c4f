"""What a job says of the processes that it consists of."""

from __future__ import annotations

from geartrain.workers.job.ranks import JobRanks


def test_a_command_to_go_on_starts_as_many_processes_on_each_machine() -> None:
    assert JobRanks().launcher == ""
    assert JobRanks(3, 8, 1, local_world_size=2).launcher == "torchrun --nproc-per-node 2 -m "
