"""Occurrences are counted once, whatever becomes of the requests that carry them."""

from __future__ import annotations

import numpy as np

from geartrain.ams.values.admission.rules import MinCount
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.specs import Constant
from tests.faults.test_exactly_once import behind_proxies

NUM_IDS, PUSHES = 1500, 30


def test_an_id_is_admitted_at_its_nth_occurrence_through_a_faulty_network() -> None:
    with behind_proxies(2, 11, 50_000, "tcp") as (cluster, proxies, _):
        rule = MinCount(PUSHES // 2, 1 << 20)
        table = cluster.create_table("a", dim=64, optimizer=SGD(1.0), admission=rule, initializer=Constant(0))
        for proxy in proxies:
            proxy.begin_faults()
        random = np.random.default_rng(5)
        counts, rows = np.zeros(NUM_IDS, np.int64), np.zeros(NUM_IDS)
        for _ in range(PUSHES):
            ids = random.choice(NUM_IDS, 1200)
            table.push(ids, np.ones((len(ids), 64), np.float32))
            occurred = np.bincount(ids, minlength=NUM_IDS)
            counts += occurred
            rows -= np.where(counts >= PUSHES // 2, occurred, 0)
        for proxy in proxies:
            proxy.end_faults()
        assert sum(sum(proxy.counts.values()) for proxy in proxies) >= 3
        np.testing.assert_array_equal(table.pull(np.arange(NUM_IDS))[:, 0], rows)
        np.testing.assert_array_equal(table.present(np.arange(NUM_IDS)), counts >= PUSHES // 2)
