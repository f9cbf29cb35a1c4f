"""Large pulls by TCP under TLS against plain text over a link of 10 Gbit/s, of two network namespaces and ``tc``.

A target of 0.9 says "at least 0.9 of the speed". Links need root and some programs; without them nothing is measured,
and what is missing is printed. Client and shard share this machine's cores; where others want them, too, give these two
the right of way (``chrt -r 5 geartrain bench security_link``). "The line" is what the link takes for the rows' bytes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import numpy as np
from _calls import WAYS, client_processes, draws, fill
from _common import result
from _rank_group import INTERFACE, address_of, inside, linked_namespaces, why_no_links
from _up import running_cluster

import geartrain as gt
from geartrain.ams.values.config import CERTIFIED_ROLES, FOLDER_VARIABLE, NO_FOLDER
from geartrain.launch.bench import Result
from geartrain.launch.certificates import create_authority, issue

NUM_IDS, DIM, NUM_ROWS, ROUNDS, CALLS, UNCOUNTED = 10_000, 128, 50_000, 12, 16, 4
BITS = 10e9


def results(full: bool = False) -> Iterator[Result]:  # noqa: ARG001
    """Yield the cases of ``geartrain bench security_link``."""
    if why := why_no_links():
        print(f"security_link is left out: {why}")
        return
    with ExitStack() as ends:
        folder = ends.enter_context(tempfile.TemporaryDirectory())
        create_authority(Path(folder), "bench")
        for role in CERTIFIED_ROLES:
            issue(Path(folder), Path(folder), [role])
        here, there = map(_receiving_anywhere, linked_namespaces(ends, 2, BITS))
        clients = []
        for settings, flags in (({FOLDER_VARIABLE: NO_FOLDER}, ["--insecure"]), ({FOLDER_VARIABLE: folder}, [])):
            settings |= {"GEARTRAIN_SERVER__LISTEN": f"{address_of(1)}:0"}
            up = ends.enter_context(running_cluster(host=address_of(1), settings=settings, flags=flags, prefix=there))
            command = [*here, sys.executable, __file__, up["scheduler"]]
            clients += ends.enter_context(client_processes([command], settings=settings))
        turns = []
        for _ in range(ROUNDS + 1):
            turn = []
            for client in clients:
                assert client.stdin is not None
                assert client.stdout is not None
                print(file=client.stdin, flush=True)
                turn.append(json.loads(client.stdout.readline()))
            turns.append(turn)
        plain, tls = (1e3 * median(seconds) for seconds in zip(*turns[1:], strict=True))
    size = NUM_IDS * DIM * 4
    case = f"pull of {size / 1e6:.0f} MB, a link of {BITS / 1e9:.0f} Gbit/s, TLS"
    yield result(case, tls, "plain", plain, "ms", target=0.9)
    yield result(case, tls, "the line", size * 8 / BITS * 1e3, "ms")


def _receiving_anywhere(namespace: int) -> list[str]:
    """What a command begins with that is to run in a namespace. What comes there is received by any core, as it is not
    the sender's on another machine."""
    mask = f"{sum(1 << core for core in os.sched_getaffinity(0)):x}"
    told = f"mount -t sysfs none /sys && echo {mask} > /sys/class/net/{INTERFACE}/queues/rx-0/rps_cpus"
    subprocess.run([*inside(namespace), "unshare", "--mount", "sh", "-c", told], check=True)
    return inside(namespace)


def _serve_turns(address: str) -> None:
    """A client process: for each line, pull some times and print the median seconds."""
    with gt.connect(address, config=WAYS["TCP"]) as cluster:
        table = cluster.create_table("bench", dim=DIM, optimizer=gt.SGD(lr=0.1), num_rows=NUM_ROWS)
        fill(table)
        draw, out = draws(NUM_ROWS, NUM_IDS), np.empty((NUM_IDS, DIM), np.float32)
        print("ready", flush=True)
        for _ in sys.stdin:
            seconds = []
            for _ in range(CALLS):
                ids, began = draw(), time.perf_counter()
                table.pull_into(ids, out)
                seconds.append(time.perf_counter() - began)
            print(json.dumps(median(seconds[UNCOUNTED:])), flush=True)


if __name__ == "__main__":
    _serve_turns(*sys.argv[1:])
