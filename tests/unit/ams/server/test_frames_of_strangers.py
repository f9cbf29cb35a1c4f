"""Frames that anybody can write, well formed and full of lies: each costs a shard little memory and little time."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from geartrain.ams.kernels import _core
from geartrain.ams.server.shard import Shard
from geartrain.ams.values.admission.rules import MinCount
from geartrain.ams.values.expiry.rules import Unseen
from geartrain.ams.values.optimizers.registry import SGD, SparseMomentum
from geartrain.ams.values.shard_messages import CallContext, CreateTable
from geartrain.ams.values.specs import Constant, TableSpec
from tests.support import frame_calls, frame_codec
from tests.support.frame_codec import Described

DIM = 8
SECONDS = 60.0
MAX_BYTES = 32 << 20
"""That one frame of a few hundred bytes may take."""
MAX_CPU_SECONDS = 0.5
"""That it may keep the shard at work: time of the processor, so that other processes do not count."""
TABLES = {
    "plain": TableSpec(name="plain", dim=DIM, optimizer=SGD(0.1), initializer=Constant(0)),
    "dense": TableSpec(name="dense", dim=DIM, optimizer=SGD(0.1), num_rows=1 << 40),
    "elapsed": TableSpec(name="elapsed", dim=DIM, optimizer=SparseMomentum(0.1, untouched="elapsed"), num_rows=1000),
    "admitting": TableSpec(name="admitting", dim=DIM, optimizer=SGD(0.1), admission=MinCount(3)),
    "expiring": TableSpec(name="expiring", dim=DIM, optimizer=SGD(0.1), expiry=Unseen(steps=100)),
}
pytestmark = pytest.mark.exact_memory


@pytest.fixture
def shard() -> Iterator[Shard]:
    shard = Shard(0, np.arange(4096), incarnation=1, sync_timeout_seconds=SECONDS)
    for spec in TABLES.values():
        shard.submit(CallContext(), CreateTable(spec=spec)).result(SECONDS)
    yield shard
    shard.close()


@pytest.fixture
def connection(shard: Shard) -> Iterator[_core.DataConnection]:
    server = _core.DataServer(_core.EngineHandler(shard.engine), host="127.0.0.1")
    yield frame_calls.dial("tcp", *server.offer())
    server.close()


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) << 10


class Costs:
    """Asks a shard, and looks at what that costs: more memory than ever before, and time of the processor."""

    def __init__(self, connection: _core.DataConnection) -> None:
        self._connection = connection
        Path("/proc/self/clear_refs").write_text("5")

    def of(self, one: Described, seconds: float = SECONDS) -> tuple[Described, int, float]:
        """The answer, bytes and seconds. ``seconds``: what the shard is told that the caller waits."""
        before, began = peak_bytes(), time.process_time()
        call, number = frame_calls.begin(self._connection, [one], seconds)
        assert call.wait(SECONDS)
        (told,) = frame_codec.parsed_reply(call.reply(), number, [frame_calls.rows_bytes(one)])
        return told, peak_bytes() - before, time.process_time() - began


def part(table: str, ids: list[int], dim: int, group: Described, **more: Any) -> Described:
    return frame_calls.push(table, ids, dim, stream=group["job"], sequence=1, incarnation=1, group=group, **more)


def test_an_empty_part_of_a_rank_costs_nothing_however_wide_it_says_its_rows_are(
    connection: _core.DataConnection,
) -> None:
    alone = {"job": "j", "world_size": 1, "rank": 0, "sequence": 1, "sample_count": 1}
    told, added, _ = Costs(connection).of(part("plain", [], 2**28, alone))
    assert told["error"] == "InvalidRows" and "they must be of width 8" in told["message"]
    assert added < MAX_BYTES


LARGE = (0, 1, 2**20, 2**31, 2**40, 2**62, 2**63 - 1, -1, -(2**63))


def lie(draw: random.Random, number: int) -> Described:
    """A frame that says anything, with few rows of its own."""
    kind = draw.choice(["pull", "push", "push", "assign"])
    dim = draw.choice([DIM, DIM, DIM, 1, 2**10, 2**20, 2**28, 2**32 - 1])
    ids = [draw.choice([*range(8), 2**31, 2**62, 2**63 - 1, -1]) for _ in range(draw.choice([0, 1, 5, 20]))]
    if dim > 2**10:
        ids = [] if kind != "pull" else ids[: 2**26 // dim]
    one = (frame_calls.pull if kind == "pull" else frame_calls.push)(draw.choice(list(TABLES)), ids, dim)
    one |= {"kind": kind, "stream": f"s{draw.choice([0, 1, number])}"}
    one |= {name: draw.choice(LARGE) for name in ("sequence", "incarnation", "oldest_unacknowledged")}
    one |= {"sequence": number, "incarnation": 1, "oldest_unacknowledged": 0} if draw.random() < 0.7 else {}
    group = {"job": f"j{draw.choice([0, number])}", "world_size": draw.choice([1, 2, 65_536, *LARGE])}
    group |= {"rank": draw.choice([0, 1, 65_535]), "sequence": draw.choice([1, *LARGE])}
    group |= {"sample_count": draw.choice([1, *LARGE])}
    if kind == "push":
        one |= {"lr": draw.choice([0.0, 0.1, 1e300])} if draw.random() < 0.5 else {}
        one |= {"step": draw.choice(LARGE)} if draw.random() < 0.5 else {}
        one |= {"unix_seconds": draw.choice([0.0, 1.7e9, 1e18, 1e300])} if draw.random() < 0.5 else {}
        one |= {"pulled_at": draw.choice(LARGE)} if draw.random() < 0.5 else {}
        most = np.full(len(ids), draw.choice([0, 1, 2**32 - 1]), np.uint32)
        one |= {"occurrences": most.tobytes()} if draw.random() < 0.5 else {}
        one |= {"group": group} if draw.random() < 0.5 else {}
    elif kind == "pull":
        one |= {"required_sync": group} if draw.random() < 0.5 else {}
    return one


@pytest.mark.parametrize("seed", range(4))
def test_no_frame_of_a_few_hundred_bytes_costs_much_memory_or_time(connection: _core.DataConnection, seed: int) -> None:
    draw, costs = random.Random(seed), Costs(connection)
    for number in range(1, 300):
        one = lie(draw, number)
        _, added, seconds = costs.of(one, seconds=0.01 if "group" in one else SECONDS)
        assert (added < MAX_BYTES, seconds < MAX_CPU_SECONDS) == (True, True), (one, added, seconds)
    assert "error" not in frame_calls.ask(connection, frame_calls.pull("plain", [1], DIM))[0]
