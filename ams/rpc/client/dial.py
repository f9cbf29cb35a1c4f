"""Carriers from a program to a cluster's processes over gRPC, which is loaded only on demand."""

from __future__ import annotations

from collections.abc import Callable

from geartrain.ams.rpc.carrier import SchedulerCarrier, ShardCarrier
from geartrain.ams.values.config import ClientConfig, split_address
from geartrain.ams.values.errors import ConfigError


def dial(
    address: str, config: ClientConfig, *, once: bool = False
) -> tuple[SchedulerCarrier, Callable[[str, int], ShardCarrier]]:
    """Return a carrier to the scheduler at ``address`` ("host:port"), and a function that opens one to a shard.

    Nothing is sent. With ``once``, calls are not retried: they wait for a connection for ``connect_timeout_seconds``.

    Raises ConfigError if the address is malformed.
    """
    if split_address(address)[1] == 0:
        raise ConfigError(f"scheduler address {address!r} has port 0; give the port that 'geartrain scheduler' printed")
    # An embedded cluster never loads gRPC.
    from geartrain.ams.rpc.channel import seconds_to_connect
    from geartrain.ams.rpc.client.scheduler import GrpcSchedulerCarrier
    from geartrain.ams.rpc.client.shard import GrpcCarrier

    attempt_seconds = config.attempt_timeout_seconds
    connect_seconds = config.connect_timeout_seconds if once else seconds_to_connect(attempt_seconds)

    def open_carrier(shard_address: str, shard: int) -> ShardCarrier:
        split_address(shard_address)  # from another process, so not checked yet
        return GrpcCarrier(
            shard_address,
            shard,
            part_bytes=config.part_bytes,
            max_message_bytes=config.max_message_bytes,
            shared_memory=config.shared_memory,
            connect_seconds=connect_seconds,
        )

    scheduler = GrpcSchedulerCarrier(
        address, max_message_bytes=config.max_message_bytes, connect_seconds=connect_seconds
    )
    return scheduler, open_carrier
