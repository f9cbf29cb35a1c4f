"""A shard whose memory ends at any step of a call: what it says is true, and a write sent again is applied once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[3] / "support/scarce_memory.cpp"

SHARD = """
import ctypes, sys
import numpy as np
from geartrain.ams.kernels import _core
from geartrain.ams.server.shard import Shard
from geartrain.ams.values.optimizers.registry import Momentum
from geartrain.ams.values.shard_messages import CallContext, CreateTable
from geartrain.ams.values.specs import Constant, TableSpec
from tests.support import frame_calls, frame_codec

way, times, preloaded = sys.argv[1], int(sys.argv[2]), ctypes.CDLL(sys.argv[3])
shard = Shard(0, np.arange(4096), incarnation=1)
spec = TableSpec(name="t", dim=4, optimizer=Momentum(1.0, momentum=0.0), initializer=Constant(0))
shard.submit(CallContext(), CreateTable(spec=spec)).result(10)
server = _core.DataServer(_core.EngineHandler(shard.engine), host="127.0.0.1")
connection = None
UNTOLD = {"ShardUnavailable"}
CHANGED_NOTHING = {"OutOfMemory", "Busy"}


def ask(*operations):
    global connection
    if connection is None or connection.is_lost:
        connection = frame_calls.dial(way, *server.offer())
        frame_calls.ask(connection, frame_calls.pull("t", [1]))  # its mailbox, and the shard's memory for it
    try:
        call, number = frame_calls.begin(connection, operations)
        assert call.wait(10.0)
    except _core.ConnectionLost:
        return None
    frame = call.reply()
    sizes = [frame_calls.rows_bytes(one) for one in operations]
    if frame_codec.parsed_header(frame, 2)[0] == 1:  # refused as a whole
        return frame_codec.parsed_reply(frame, number, sizes[:1]) * len(sizes)
    return frame_codec.parsed_reply(frame, number, sizes)


def rows_of(ids):
    ((reply),) = ask(frame_calls.pull("t", ids))
    return np.frombuffer(reply["rows"], np.float32).reshape(len(ids), 4)
"""

WRITES = """
ask(frame_calls.pull("t", [1]))
told = set()
for first in range(1000):
    stream = f"a stream whose name is long {first}"
    ids = [first * 10 + 1, first * 10, first * 10 + 2, first * 10 + 1]  # neither rising nor distinct
    write = {"stream": stream, "incarnation": 1, "sequence": 1}
    asked = [frame_calls.push("t", ids, **write), frame_calls.push("t", [first * 10 + 5], **(write | {"sequence": 2}))]
    preloaded.refuse_memory(b"geartrain-data", first, times)
    replies = ask(*asked)
    left = preloaded.still_to_refuse()
    preloaded.refuse_memory(b"", 0, 0)
    rows = rows_of(sorted(set(ids)))
    error = "lost" if replies is None else replies[0].get("error", "")
    told.add(error)
    if error in CHANGED_NOTHING:
        assert (rows == 0).all(), (first, replies, rows)
    elif not error:
        assert (rows != 0).all(), (first, replies, rows)
    else:
        assert error == "lost" or error in UNTOLD, (first, replies)
    again = ask(*asked)
    assert [one.get("error") for one in again] == [None, None], (first, again)
    assert again[0]["duplicate"] == bool((rows != 0).any()), (first, rows, again)
    assert rows_of(sorted(set(ids))).tolist() == [[-1.0] * 4, [-2.0] * 4, [-1.0] * 4], first
    assert (rows_of([first * 10 + 5]) == -1).all()
    if left == times:
        break
else:
    raise AssertionError("no call was ever whole")
print(first, sorted(told))
server.close()
shard.close()
"""

JOINT_STEPS = """
RANKS = (0, 1)
links = {}
told = set()


def part(rank, first):
    group = {"job": "a job whose name is long", "world_size": 2, "rank": rank, "sequence": first + 1, "sample_count": 1}
    ids = [first * 10 + 1, first * 10, first * 10 + 2 + rank]
    write = {"stream": f"a stream whose name is long {rank}", "incarnation": 1, "sequence": first + 1}
    return frame_calls.push("t", ids, group=group, **write)


def dial(rank):
    if rank not in links or links[rank].is_lost:
        links[rank] = frame_calls.dial(way, *server.offer())
        frame_calls.ask(links[rank], frame_calls.pull("t", [1]))  # as in `ask`


def begin(rank, first):
    dial(rank)
    return frame_calls.begin(links[rank], [part(rank, first)])


def end(begun):
    try:
        assert begun[0].wait(10.0), "a rank is told nothing"
    except _core.ConnectionLost:
        return "lost"
    return frame_codec.parsed_reply(begun[0].reply(), begun[1], [0])[0].get("error", "")


def rows_there(first):
    ((reply),) = ask(frame_calls.pull("t", [first * 10 + place for place in range(4)]))
    return np.frombuffer(reply["rows"], np.float32).reshape(4, 4)[:, 0].tolist()


def has_joined():
    with shard.engine.turn:
        return shard._groups.next_deadline() is not None


for first in range(1000):
    ask(frame_calls.pull("t", [1]))
    early = begin(0, first)
    while not has_joined():
        pass
    dial(1)
    preloaded.refuse_memory(b"geartrain-data", first, times)
    errors = [end(begin(1, first))]
    left = preloaded.still_to_refuse()
    preloaded.refuse_memory(b"", 0, 0)
    rows = rows_there(first)
    told.add(errors[0])
    if errors[0] in CHANGED_NOTHING:
        assert rows == [0] * 4, (first, errors, rows)
    again = [begin(rank, first) for rank in RANKS]
    errors += [end(early), *map(end, again)]
    assert errors[2:] == ["", ""], (first, errors)
    assert rows_there(first) == [-1, -1, -0.5, -0.5], (first, errors, rows, rows_there(first))
    if left == times:
        break
else:
    raise AssertionError("no step was ever whole")
print(first, sorted(told))
server.close()
shard.close()
"""


@pytest.fixture(scope="module")
def preloaded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that refuses memory."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("no C++ compiler")
    library = tmp_path_factory.mktemp("scarce") / "scarce_memory.so"
    subprocess.run([compiler, "-std=c++20", "-O1", "-shared", "-fPIC", "-o", library, SOURCE], check=True)
    return library


@pytest.mark.exact_memory
@pytest.mark.parametrize(("way", "times"), [("ring", 1), ("tcp", 1_000_000)])
def test_a_write_that_was_applied_is_never_answered_as_if_it_were_not(preloaded: Path, way: str, times: int) -> None:
    run(preloaded, WRITES, way, times)


@pytest.mark.exact_memory
@pytest.mark.parametrize("times", [1, 4])
def test_a_joint_step_is_applied_once_wherever_memory_ends(preloaded: Path, times: int) -> None:
    run(preloaded, JOINT_STEPS, "tcp", times)


def run(preloaded: Path, script: str, way: str, times: int) -> None:
    environment = {**os.environ, "LD_PRELOAD": str(preloaded)}
    done = subprocess.run(
        [sys.executable, "-c", SHARD + script, way, str(times), preloaded],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
