"""The end of a process whose other threads are at work in compiled code: that of its main thread, and quiet."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys, threading
import numpy as np
import geartrain as gt
from geartrain.ams.kernels import _core
from tests.support.frame_calls import ask, begin, dial, pull

way, work = sys.argv[1:]
begun = threading.Event()
server = _core.DataServer(_core.ToyHandler(), host="127.0.0.1", uses_tls=way == "tls")


def embedded():
    cluster = gt.local()
    table = cluster.create_table("t", dim=16, optimizer=gt.SGD(lr=1.0))
    while True:
        table.pull(np.arange(100_000))
        begun.set()


def busy():
    connection = dial(way, *server.offer())
    while True:
        ask(connection, pull("rows", range(10), 4))
        begun.set()


def waiting():
    call, _ = begin(dial(way, *server.offer()), [pull("held", [1])])
    begun.set()
    call.wait(60.0)


for _ in range(3):
    threading.Thread(target=globals()[work], daemon=True).start()
assert begun.wait(20)
sys.exit(3)
"""


@pytest.mark.parametrize(
    ("way", "work"), [("ring", "embedded"), ("ring", "busy"), ("tcp", "busy"), ("tls", "busy"), ("ring", "waiting")]
)
def test_a_process_ends_quietly_while_its_threads_call(way: str, work: str) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, way, work], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "")
