"""Servers that share a machine, or a container, share what their rows may take."""

from __future__ import annotations

import time

from geartrain.ams.client.cluster_status import cluster_status
from geartrain.ams.server.machine import default_row_memory, memory_pool
from tests.integration.commands.test_up import up


def test_servers_of_one_machine_divide_its_memory() -> None:
    whole = default_row_memory(memory_pool().num_bytes)
    with up("--shards=2") as running:
        until = time.monotonic() + 20
        while (limits := {shard.memory_limit_bytes for shard in cluster_status(running.facts["scheduler"]).shards}) != {
            whole // 2
        }:
            assert time.monotonic() < until, limits  # as their heartbeats tell
            time.sleep(0.1)
