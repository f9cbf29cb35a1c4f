"""Workers that die while they start: others are started in their place, a few times, and then it is said."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from geartrain.ams.values.config import ClusterConfig, ServeConfig
from geartrain.launch.serving import worker
from geartrain.launch.serving.workers import Lines, Workers

STANDS_IN = """
import json, os, socket, sys
with open(sys.argv[1], "a") as starts:
    starts.write("x")
    if not (starts.tell() <= 2 or starts.tell() > int(sys.argv[2])):
        os.kill(os.getpid(), 9)
parent = socket.socket(fileno=int(sys.argv[3]))
parent.sendall(b'{"ready": true}\\n')
for line in parent.makefile():
    said = json.loads(line)
    if "do" in said:
        parent.sendall(json.dumps({"id": said["id"], "told": {"said": said["do"]["wish"]}}).encode() + b"\\n")
"""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Workers]]:
    """Start two workers that stand in. The third that is started dies at once, and each after it up to a number."""
    popen, running = subprocess.Popen, list[Workers]()

    def start(dies_up_to: int) -> Workers:
        def stand_in(command: list[str], **settings: Any) -> subprocess.Popen[bytes]:
            own = [sys.executable, "-S", "-c", STANDS_IN, str(tmp_path / "starts"), str(dies_up_to), command[4]]
            return popen(own, **settings)

        monkeypatch.setattr(subprocess, "Popen", stand_in)
        config = ClusterConfig(serve=ServeConfig(listen="127.0.0.1:0", models=("unread",), workers=2))
        running.append(Workers(config))
        return running[-1]

    yield start
    for workers in running:
        workers.stop(5)


def kill_one(workers: Workers) -> None:
    next(iter(workers._workers.values())).process.kill()


def test_one_that_dies_while_it_starts_is_started_again(start: Callable[[int], Workers], tmp_path: Path) -> None:
    workers = start(4)
    kill_one(workers)
    while (tmp_path / "starts").stat().st_size < 5:
        pass
    assert [told.get("said") for told in workers.everywhere({"wish": "state"})] == ["state", "state"]
    assert workers.stop_reason is None


def test_one_that_is_being_started_ends_with_the_others(
    start: Callable[[int], Workers], monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = start(0)
    stand_in, started, stopping = subprocess.Popen, list[Any](), threading.Thread(target=lambda: workers.stop(5))

    def while_it_ends(*given: Any, **settings: Any) -> Any:
        stopping.start()
        stopping.join(0.5)  # it would be over, if it did not wait for this one
        started.append(stand_in(*given, **settings))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", while_it_ends)
    kill_one(workers)
    assert workers.ended_all.wait(20)
    stopping.join()
    assert [one.poll() is not None for one in started] == [True]


def test_workers_that_die_again_and_again_are_told_of_and_no_more_are_started(
    start: Callable[[int], Workers], tmp_path: Path
) -> None:
    workers = start(1000)
    kill_one(workers)
    assert workers.ended_all.wait(60)
    assert (
        workers.stop_reason
        == "its workers ended 6 times in 600 s; at last worker 0 did not start: a worker died meanwhile"
    )
    assert (tmp_path / "starts").stat().st_size == 2 + 5


def test_a_thread_that_waits_for_other_workers_waits_no_longer_than_their_parent_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine, theirs = socket.socketpair()
    monkeypatch.setattr(os, "kill", lambda *_: None)
    parent, other = worker._Parent(Lines(mine)), Lines(theirs)
    with ThreadPoolExecutor(1) as asker:
        asked = asker.submit(parent.everywhere, {"wish": "counts"})
        assert other.receive() == {"wish": {"wish": "counts"}, "id": 0}
        other.close()
        parent.listen(None)  # type: ignore[arg-type]
        assert asked.result(20) == [{"error": "Unavailable", "message": "the service is ending"}]
    parent.lines.close()
