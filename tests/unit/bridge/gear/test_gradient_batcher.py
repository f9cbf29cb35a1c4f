"""What the state machine of test_gradient_batcher_model.py does not reach: many ids, threads, garbage, torn changes."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest

import geartrain as gt
from geartrain.ams.values.errors import StateFailed
from geartrain.ams.values.gear_messages import Delivery, GearAccount
from geartrain.bridge.gear.batch_state import BatchState, DueBatch
from geartrain.bridge.gear.gradient_batcher import GradientBatcher

DIM = 3


def batcher(gradients_per_id: int = 2, **settings: Any) -> GradientBatcher:
    return GradientBatcher(DIM, gradients_per_id, gt.SlowGearConfig(**settings))


def add(to: GradientBatcher, sequence: int, values: dict[int, float], dense_version: int = 0, **more: Any) -> None:
    given: dict[str, Any] = {"source": "fast", "versions": [0] * len(values), "lr": None} | more
    given["versions"] = np.array(given["versions"], np.int64)
    rows = np.array([[value, 2 * value, -value] for value in values.values()], np.float32)
    ids = np.array(list(values), np.int64)
    to.add(Delivery(incarnation=1, sequence=sequence, ids=ids, gradients_KD=rows, **given), dense_version)


def taken(to: GradientBatcher) -> DueBatch:
    batch = to.due()
    assert batch is not None
    return batch


def test_of_many_that_wait_exactly_the_overdue_are_due_the_first_first() -> None:
    now = [1000.0]
    gradients = batcher(2, flush_seconds=50.0, clock=lambda: now[0])
    for sequence in range(100):
        add(gradients, sequence, dict.fromkeys(range(20 * sequence, 20 * sequence + 20), 1.0))
        now[0] += 1.0
    again = list(range(0, 2000, 4))  # full batches, among those that wait
    add(gradients, 100, dict.fromkeys(again, 1.0))
    assert taken(gradients).ids.tolist() == again + [number for number in range(51 * 20) if number % 4]
    gradients.complete()
    now[0] += 0.9
    assert gradients.due() is None
    now[0] += 0.1
    assert taken(gradients).ids.tolist() == [number for number in range(51 * 20, 52 * 20) if number % 4]


def test_a_sum_beyond_float32_is_dropped_and_counted() -> None:
    gradients = batcher(2, reduction="sum")
    for sequence in (1, 2):
        add(gradients, sequence, {1: 1.0, 2: 1.5e38})
    batch = taken(gradients)
    assert (batch.ids.tolist(), batch.gradients[0, 0], batch.counts.tolist()) == ([1], 2.0, [[2]])
    assert gradients.account() == GearAccount(received=4, due=2, non_finite=2)


def test_the_newest_learning_rate_and_the_lowest_version_travel_with_the_batch() -> None:
    gradients = batcher(2)
    add(gradients, 1, {1: 1.0}, versions=[5], dense_version=9, lr=0.1)
    add(gradients, 2, {1: 1.0, 2: 1.0}, versions=[3, 9], dense_version=9, lr=0.05)
    add(gradients, 3, {2: 1.0}, versions=[8], dense_version=9)
    batch = taken(gradients)
    assert batch.lr == 0.05 and batch.versions.tolist() == [3, 8]
    gradients.complete()
    add(gradients, 4, {1: 1.0})
    gradients.flush()
    assert taken(gradients).lr is None


def test_threads_may_add_while_another_takes() -> None:
    gradients = batcher(2)
    sources = [f"s{number}" for number in range(4)]

    def send(source: str) -> None:
        for sequence in range(50):
            add(gradients, sequence, dict.fromkeys(range(20), 1.0), source=source)

    threads = [threading.Thread(target=send, args=(source,)) for source in sources]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) or gradients.account().due:
        batch = gradients.due()
        if batch is not None:
            np.testing.assert_array_equal(batch.gradients[:, 0], 1.0)
            gradients.complete()
    assert [gradients.account(source).received for source in sources] == [1000] * 4
    account = gradients.account()
    assert account.applied + account.waiting == 4000 and account.due == 0


def test_what_is_garbage_may_ask_for_the_account_in_the_middle_of_a_change() -> None:
    class Dropped:
        def __init__(self) -> None:
            self.circle = self

    def clock() -> float:
        gc.collect()
        return 0.0

    gradients = batcher(1, clock=clock)
    asked: list[GearAccount] = []
    gc.disable()
    try:
        weakref.finalize(Dropped(), lambda: asked.append(gradients.account()))
        adding = threading.Thread(target=add, args=(gradients, 1, {1: 1.0}), daemon=True)
        adding.start()
        adding.join(30)
    finally:
        gc.enable()
    assert not adding.is_alive()
    assert asked == [GearAccount()]
    assert gradients.account().received == 1


def test_a_change_that_was_torn_out_half_way_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = batcher(1)
    with monkeypatch.context() as patch:
        patch.setattr(BatchState, "_gather", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            add(gradients, 1, {1: 1.0})
    with pytest.raises(StateFailed, match="interrupted by KeyboardInterrupt"):
        add(gradients, 1, {1: 1.0})
