"""Row calls of a cluster with Prometheus metrics, scraped each second, against one without.

Both are processes of this machine; a call of the one follows a call of the other. A target of 0.97 means "at most 3 %
slower". Medians of many short turns: a machine that others use gives no figures to a percent.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from _common import median_seconds, result
from _up import running_cluster

import geartrain as gt
from geartrain.ams.client.table import Table
from geartrain.ams.values.config import NO_FOLDER, identify
from geartrain.launch.bench import Result

NUM_IDS, DIM, NUM_ROWS, BATCH, WIDTH = 100, 16, 100_000, 512, 256
ROUNDS = 40
_SCRAPER = """
import sys, time, urllib.request
while True:
    for address in sys.argv[1:]:
        urllib.request.urlopen(f"http://{address}/metrics").read()
    time.sleep(1)
"""
NEEDS = ("prometheus_client",)
WITHOUT = {"GEARTRAIN_SECURITY__FOLDER": NO_FOLDER}


def results(full: bool = False) -> Iterator[Result]:
    """Yield the cases of ``geartrain bench metrics``; ``full`` takes five times as many turns."""
    identify(NO_FOLDER)
    rounds = ROUNDS * (5 if full else 1)
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(DIM, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 1))
    random = np.random.default_rng(0)

    def step(table: Table) -> Callable[[np.ndarray], object]:
        def run(ids: np.ndarray) -> None:
            rows = torch.from_numpy(table.pull(ids)).requires_grad_()
            network(rows).square().mean().backward()
            assert rows.grad is not None
            table.push(ids, rows.grad.numpy())

        return run

    with _table(watched=True) as watched, _table(watched=False) as alone:
        gradients = np.ones((NUM_IDS, DIM), np.float32)
        sides = [watched, alone]
        for case, size, calls, target in (
            (f"pull of {NUM_IDS} rows, D={DIM}", NUM_IDS, [table.pull for table in sides], 0.97),
            (
                f"push of {NUM_IDS} rows",
                NUM_IDS,
                [lambda ids, t=table: t.push(ids, gradients) for table in sides],
                0.97,
            ),
            (f"training step, {BATCH} rows", BATCH, [step(table) for table in sides], 0.99),
        ):
            ours, theirs = median_seconds(
                calls,
                lambda size=size: np.unique(random.integers(NUM_ROWS, size=2 * size))[:size],
                rounds=rounds,
                calls=200 if size == NUM_IDS else 20,
            )
            yield result(case, ours * 1e6, "without --metrics", theirs * 1e6, "µs", target=target)


@contextmanager
def _table(*, watched: bool) -> Iterator[Table]:
    with ExitStack() as stack:
        flags = ["--metrics=127.0.0.1:0"] if watched else []
        cluster = stack.enter_context(running_cluster(flags=flags, settings=WITHOUT))
        if watched:
            scraper = subprocess.Popen([sys.executable, "-P", "-c", _SCRAPER, *cluster["metrics"].values()])
            stack.callback(scraper.kill)
        table = stack.enter_context(gt.connect(cluster["scheduler"])).create_table(
            "rows", dim=DIM, optimizer=gt.SGD(lr=0.01)
        )
        table.assign(np.arange(NUM_ROWS), np.ones((NUM_ROWS, DIM), np.float32))
        yield table
