"""One of two slow gears is killed in mid-run: what that costs in time, and where every gradient went.

Scheduler, shard and slow gears are processes of their own, the fast gear is this one; page views, M=4, expiry 5 s, the
waiting gradients in the slow gears' memory. At the middle of the second of two equal runs a slow gear gets SIGKILL. Its
ids go to the other one when its lease of two seconds ends; the fast gear waits for that, delivers again what was not
acknowledged, and counts what died with the process. The AUC at the end says what that costs, up to the noise of runs in
which processes race: about half a point.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from _gear_processes import LEASE_SECONDS, Processes
from _gear_race import first, keep
from _gear_task import BATCH, DIM, LEARNING_RATE, THREADS, build_dense, build_fast, page_views, test_auc
from torch.nn import functional

import geartrain as gt
from geartrain.ams.values.errors import InternalError
from geartrain.ams.values.gear_messages import GearAccount

STEPS = 400
GRADIENTS_PER_ID = 4
EXPIRE_SECONDS = 5.0


def results(full: bool = False) -> Iterator[dict[str, Any]]:
    """The case of ``geartrain bench gear_kill``; ``full`` has four times as many steps."""
    steps = STEPS * (4 if full else 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        seconds, before, auc = run(steps, kill=False)
        killed_seconds, account, killed_auc = run(steps, kill=True)
    finally:
        torch.set_num_threads(threads)
    for one in (before, account):
        if not one.adds_up or one.waiting or one.due:
            raise InternalError(f"the account does not add up: {one}")
    keep(
        "killed",
        {
            "steps": steps,
            "seconds": seconds,
            "killed_seconds": killed_seconds,
            "lease_seconds": LEASE_SECONDS,
            "auc": auc,
            "killed_auc": killed_auc,
            "account": {"received": account.received, "applied": account.applied, "lost": account.lost},
        },
    )
    yield {
        "case": f"{steps} steps, one of two slow gears killed half-way: of {account.received:,} gradients "
        f"{account.applied:,} applied, {account.lost:,} lost with its memory, none unaccounted for; "
        f"AUC {100 * killed_auc:.2f} against {100 * auc:.2f}",
        "ours": round(killed_seconds, 2),
        "rival": "the same without a kill",
        "theirs": round(seconds, 2),
        "unit": "s",
        "ratio": round(seconds / killed_seconds, 2),
        "target": None,
    }


def run(steps: int, *, kill: bool) -> tuple[float, GearAccount, float]:
    """Seconds of a run, what became of its gradients, and its AUC."""
    data = page_views()
    fast = build_fast(data, 0)
    optimizer = torch.optim.Adam(fast.parameters(), lr=LEARNING_RATE, fused=True)
    with ExitStack() as stack:
        processes = Processes(stack, gradients_per_id=GRADIENTS_PER_ID)
        cluster = stack.enter_context(gt.connect(processes.address))
        gear = gt.SlowGear(
            cluster, "creative", dim=DIM, gradients_per_id=GRADIENTS_PER_ID, expire_seconds=EXPIRE_SECONDS
        )
        rows = gt.RowOptimizer(gear)
        started = time.perf_counter()
        for step, views in enumerate(first(data.train.batches(BATCH, seed=0, passes=100), steps)):
            if kill and step == steps // 2:
                processes.kill_slow_gears[0]()
            loss = functional.binary_cross_entropy_with_logits(fast(views, gear(views.images)), views.labels)
            optimizer.zero_grad()
            rows.zero_grad()
            loss.backward()
            optimizer.step()
            rows.step()
        gear.flush()
        seconds = time.perf_counter() - started
        account = gear.account()
        gear.close()
        dense = build_dense(1, 0)
        gt.attach(dense, cluster, name="creative", optimizer=gt.Adam(LEARNING_RATE), reuse=True)
        auc = test_auc(data, dense, fast)
    return seconds, account, auc
