"""A shard that has too much to do says so, and clients ask it again."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest

from geartrain.ams.client import retries
from geartrain.ams.client.factory import connect
from geartrain.ams.kernels._core import RowsClient
from geartrain.ams.rpc.client.backoff import Backoff
from geartrain.ams.rpc.services import SHARD
from geartrain.ams.server.chunked_writes import PartBuffer
from geartrain.ams.server.service import ShardService
from geartrain.ams.values.config import ClientConfig
from geartrain.ams.values.errors import Busy, ShardUnavailable, Unavailable
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.shard_messages import CallContext, Done, Push
from geartrain.ams.values.specs import Constant
from tests.support.message_rows import outcome_of, write_messages

WRITERS, PUSHES, ROWS, DIM = 8, 3, 2000, 16
CONFIG = ClientConfig(attempt_timeout_seconds=10, recovery_timeout_seconds=60)


def pushed(channel: grpc.Channel, context: CallContext, push: Push) -> Done:
    """Push in parts of 64 KiB, and again while the shard is busy or has no lease."""
    send = channel.unary_unary(SHARD[Push].path)
    while True:
        begun = [send.future(data, timeout=20) for data in write_messages(push, context, 64 << 10)]
        outcome = outcome_of(Push, [call.result for call in begun])
        if isinstance(outcome, Done):
            return outcome
        assert isinstance(outcome, Unavailable), outcome
        time.sleep(outcome.retry_after_seconds / 10 if isinstance(outcome, Busy) else 0.1)


def test_more_writers_than_the_buffer_of_parts_has_room_for_are_all_applied_once(served: Callable[..., Any]) -> None:
    cluster = served(1)
    service: ShardService = cluster.servers[0]._held[0].service
    refused: list[Busy] = []

    class Crowded(PartBuffer):
        def add(self, *arguments: Any) -> Any:
            try:
                return super().add(*arguments)
            except Busy as busy:
                refused.append(busy)
                if len(refused) == WRITERS:
                    later[0] = 16.0  # the silent one is forgotten
                raise

    later = [0.0]
    # Room for two writes of three parts, all of it held by one whose sender is silent.
    service._parts = Crowded(max_bytes=410_000, clock=lambda: time.monotonic() + later[0])
    silent = CallContext(stream="silent", incarnation=1, sequence=1, oldest_unacknowledged=1)
    assert service._parts.add(silent, 0, 2, (np.arange(1000), np.zeros((1000, 48), np.float32))) is None
    ids = np.arange(ROWS)

    def push(channel: grpc.Channel, stream: str, sequence: int, value: float) -> None:
        gradients = np.full((ROWS, DIM), value, np.float32)
        context = CallContext(stream=stream, incarnation=1, sequence=sequence, oldest_unacknowledged=sequence)
        pushed(channel, context, Push(table="t", ids=ids, gradients=gradients))

    def write(writer: int) -> None:
        with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            for number in range(PUSHES):
                push(channel, f"writer {writer}", number + 1, 1 + writer * PUSHES + number)

    with connect(cluster.address) as client:
        table = client.create_table("t", dim=DIM, optimizer=SGD(1.0), initializer=Constant(0.0))
        address = client.status().shards[0].address
        with ThreadPoolExecutor(WRITERS) as pool:
            list(pool.map(write, range(WRITERS)))
        num_writes = WRITERS * PUSHES
        assert (table.pull(ids) == -num_writes * (num_writes + 1) / 2).all()
        assert len(refused) >= WRITERS
        later[0] = 401.0  # what is left are parts that came again, late: they are forgotten
        with grpc.insecure_channel(address) as channel:
            push(channel, "last", 1, 0.0)
    assert service._parts._bytes == 0


def test_a_busy_shard_is_asked_again_when_it_says_and_the_last_word_is_its_own(
    served: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = served(1)
    pauses: list[float] = []
    whole = Backoff.pause
    monkeypatch.setattr(
        Backoff, "pause", lambda self, at_least: (pauses.append(at_least), whole(self, at_least / 100))[1]
    )
    busy = 2

    # What the compiled client is told by a shard that has no room.
    whole_pull = RowsClient.pull

    class BusyClient(RowsClient):
        def pull(self, *arguments: Any) -> Any:
            nonlocal busy
            busy -= 1
            return [(0, Busy("too many requests wait", 0.25))] if busy >= 0 else whole_pull(self, *arguments)

    monkeypatch.setattr(retries, "RowsClient", BusyClient)
    with connect(cluster.address, config=CONFIG) as client:
        table = client.create_table("t", dim=DIM, optimizer=SGD(1.0), initializer=Constant(0.0))
        assert (table.pull([1]) == 0).all()
        assert pauses == [0.25, 0.25]
        busy = 1000
        impatient = CONFIG.model_copy(update={"recovery_timeout_seconds": 0})
        client._calls.config = impatient
        with pytest.raises(Busy, match=r"shard 0 at .* busy for 0 s .* too many requests wait") as raised:
            table.pull([1])
        assert raised.value.retry_after_seconds == 0.25


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_call_whose_caller_has_gone_before_it_began_is_not_made(
    served: Callable[..., Any], shared_memory: bool
) -> None:
    cluster = served(1)
    config = CONFIG.model_copy(update={"shared_memory": shared_memory})
    hasty = config.model_copy(update={"attempt_timeout_seconds": 0.2, "recovery_timeout_seconds": 0})
    with connect(cluster.address, config=config) as client:
        table = client.create_table("t", dim=DIM, optimizer=SGD(1.0), initializer=Constant(0.0))
        turn = cluster.servers[0]._held[0].service.shard.engine.turn
        push = table.prepare_push([7], np.ones((1, DIM), np.float32))
        with turn:  # the shard is at work
            client._calls.config = hasty
            for call in (push.send, lambda: table.pull([7])):
                with pytest.raises(ShardUnavailable):
                    call()
                deadline = time.monotonic() + 10
                while turn.num_waiting:
                    assert time.monotonic() < deadline, "it waits for its turn still"
                    time.sleep(0.01)
        client._calls.config = config
        assert (table.pull([7]) == 0).all()
        assert not push.send().duplicate
        assert (table.pull([7]) == -1).all()
