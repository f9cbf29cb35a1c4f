"""So many random sequences over a simulated cluster, determined by a number."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.model.machine import ClusterMachine


def run(examples: int, number: int, *, shrink: bool = True) -> None:
    """Run so many sequences, which the number determines."""

    class Seeded(ClusterMachine):
        pass

    limits = settings(
        max_examples=examples,
        stateful_step_count=30,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    retries = logging.getLogger("geartrain.ams.client.retries")
    level = retries.level
    retries.setLevel(logging.CRITICAL)
    try:
        # Off the main thread a shard works on the thread that asks, which saves two changes of thread for each message.
        with ThreadPoolExecutor(1) as pool:
            pool.submit(run_state_machine_as_test, seed(number)(Seeded), settings=limits).result()
    finally:
        retries.setLevel(level)
