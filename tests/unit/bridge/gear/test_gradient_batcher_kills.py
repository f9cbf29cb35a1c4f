"""Real processes that die with gradients in hand: what was acknowledged is there, and counts once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from geartrain.ams.storage.kv.store import open_state
from geartrain.ams.values.gear_messages import GearAccount
from geartrain.bridge.gear.gradient_batcher import GradientBatcher
from tests.redis_child import running_redis

DIM = 8
IDS = np.arange(40)

_GEAR = f"""
import sys
import numpy as np
from geartrain.ams.values.errors import StaleClient
from geartrain.ams.storage.kv.store import open_state
from geartrain.bridge.gear.gradient_batcher import GradientBatcher

batcher = GradientBatcher.restored(open_state(sys.argv[1], "gear/7"), {DIM}, gradients_per_id=3)
ids = np.arange({len(IDS)})
sequence = 0
try:
    while True:
        sequence += 1
        rows = np.full((len(ids), {DIM}), sequence, np.float32)
        batcher.add("fast", 1, sequence, ids, rows, ids, dense_version=0)
        batch = batcher.due(7)
        if batch is not None and sequence % 2:
            batcher.done(batch.number)
        print(sequence, flush=True)
except StaleClient:
    print("stale", flush=True)
"""


@contextmanager
def working_gear(url: str) -> Iterator[subprocess.Popen[str]]:
    """A gear that adds, takes and settles until it is killed or shut out; it says each step when that is done."""
    gear = subprocess.Popen([sys.executable, "-c", _GEAR, url], stdout=subprocess.PIPE, text=True)
    try:
        yield gear
    finally:
        gear.kill()
        gear.communicate()


def steps_of(gear: subprocess.Popen[str], at_least: int) -> int:
    assert gear.stdout is not None
    step = 0
    while step < at_least:
        line = gear.stdout.readline()
        assert line, f"the gear ended after step {step}"
        step = int(line)
    return step


def check(batcher: GradientBatcher, last_heard: int) -> None:
    """All that was acknowledged is there, once; a repeat changes nothing; everything can be applied."""
    steps = batcher.report()["sources"]["fast"][1]
    assert steps >= last_heard
    account = batcher.account()
    assert account.received == steps * len(IDS) == account.waiting + account.due + account.applied
    rows = np.full((len(IDS), DIM), steps, np.float32)
    assert batcher.add("fast", 1, steps, IDS, rows, IDS, dense_version=0) == account
    batcher.flush()
    while (batch := batcher.due()) is not None:
        assert batch.gradients.min() >= 1 and batch.gradients.max() <= steps
        batcher.done(batch.number)
    assert batcher.account() == GearAccount(received=account.received, applied=account.received)


@pytest.mark.parametrize("steps", [1, 60])
def test_a_killed_gear_loses_nothing_that_was_acknowledged(tmp_path: Path, steps: int) -> None:
    url = f"lmdb:{tmp_path}"
    with working_gear(url) as gear:
        steps_of(gear, steps)
        gear.kill()
        assert gear.stdout is not None
        gear.wait()
        last_heard = max([steps, *map(int, gear.stdout.read().split())])
    store = open_state(url, "gear/7")
    check(GradientBatcher.restored(store, DIM, gradients_per_id=3), last_heard)
    store.close()


def test_another_gear_takes_over_a_living_ones_batches() -> None:
    with running_redis() as child, working_gear(child.url) as gear:
        steps_of(gear, 20)
        batcher = GradientBatcher.restored(open_state(child.url, "gear/7"), DIM, gradients_per_id=3)
        assert gear.stdout is not None
        heard = gear.stdout.read().split()  # it ends by itself
        assert heard[-1] == "stale" and gear.wait() == 0
        check(batcher, max([20, *map(int, heard[:-1])]))
