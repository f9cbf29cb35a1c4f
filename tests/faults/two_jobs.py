"""Two jobs on one cluster: one dies and goes back again and again, and the other must not notice.

Both push integers whose exact sums are known, number their pushes, take snapshots of their own tables, check every row
as they go, and go back to numbers that they have used before.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from tests.faults.children import START_TIMEOUT_SECONDS, Child
from tests.faults.scenarios import STEPS, Job, served, work

DEATHS = 3


def run_two_jobs(seed: int, folder: Path) -> int:
    """Let one job die at places that the seed says; return its deaths. Raises if either has lost or doubled a push."""
    with served() as roles, ThreadPoolExecutor(1) as beside:
        dying = beside.submit(_dies_and_ends, seed, roles.address, folder / "dies")
        rounds = 0
        while rounds == 0 or not dying.done():
            rounds += 1
            job = Job(1000 * seed + rounds, roles.address, folder / f"stays-{rounds}", table="stays", stream="stays")
            job.run()
            assert (job.wrong_rows, job.recoveries, job.damage) == (0, 0, []), f"in round {rounds}: {job}"
        survivor = dying.result()
    assert (survivor.wrong_rows, survivor.recoveries, survivor.damage) == (0, 0, []), survivor
    return DEATHS


def _dies_and_ends(seed: int, address: str, root: Path) -> Job:
    random = np.random.default_rng([seed, 2])
    of_its_own = {"table": "dies", "stream": "dies"}
    for death in range(DEATHS):
        log = root.with_name(f"dies-{death}.log")
        child = Child(partial(work, **of_its_own), seed, address, str(root), str(log))
        try:
            # 0: while it goes back; it may have ended before it comes so far.
            _wait_for(log, f"push {pushes}" if (pushes := int(random.integers(0, STEPS))) else "back", child)
            time.sleep(float(random.uniform(0, 0.02)))  # where in a push, a snapshot or a restore
        finally:
            child.end()
    job = Job(seed, address, root, went_back=True, **of_its_own)
    job.run()
    return job


def _wait_for(log: Path, line: str, child: Child) -> None:
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while child.process.is_alive() and not (log.exists() and line in log.read_text().splitlines()):
        assert time.monotonic() < deadline, f"{line!r} did not come"
        time.sleep(0.005)
