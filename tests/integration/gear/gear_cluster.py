"""Scheduler, shards and slow gears of this process, behind real sockets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from geartrain.ams.scheduler.service import SchedulerServer
from geartrain.ams.server.role import ShardServer
from geartrain.ams.values.config import ClientConfig, SchedulerConfig, ServerConfig, SlowGearRoleConfig
from geartrain.launch.slowgear_role import SlowGearRole

CLIENT = ClientConfig(attempt_timeout_seconds=10.0, recovery_timeout_seconds=20.0)
LEASE_SECONDS = 1.0


class GearCluster:
    """Two shards; slow gears are started by :meth:`start_gear`."""

    def __init__(self, stack: ExitStack, lease_seconds: float = LEASE_SECONDS) -> None:
        self._stack = stack
        config = SchedulerConfig(listen="127.0.0.1:0", num_shards=2, stream_lease_seconds=lease_seconds)
        scheduler = SchedulerServer(config)
        self.address = scheduler.start()
        stack.callback(scheduler.stop, 0)
        server = ShardServer(ServerConfig(scheduler=self.address, shards=2))
        server.start()
        stack.callback(server.stop, 0)

    def start_gear(self, **settings: Any) -> tuple[SlowGearRole, str]:
        """A slow gear, and its address."""
        role = SlowGearRole(gear_config(self.address, **settings), CLIENT)
        address = role.start()
        self._stack.callback(role.stop, 0)
        return role, address


def gear_config(scheduler: str, **settings: Any) -> SlowGearRoleConfig:
    """Settings of a slow gear of the small dense part."""
    given: dict[str, Any] = {
        "scheduler": scheduler,
        "name": "image",
        "module": "tests.integration.gear.gear_part:build",
        "samples": "tests.integration.gear.gear_part:samples",
        "dim": 4,
        "optimizer": "sgd:0.1",
        "max_wait_millis": 0.0,
        "refresh_seconds": 0.0,
    }
    return SlowGearRoleConfig(**(given | settings))


@contextmanager
def gear_cluster(lease_seconds: float = LEASE_SECONDS) -> Iterator[GearCluster]:
    """A cluster that ends with the block."""
    with ExitStack() as stack:
        yield GearCluster(stack, lease_seconds)
