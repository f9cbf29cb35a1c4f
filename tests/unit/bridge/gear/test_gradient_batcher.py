"""Gradients by id: sums and means, what is due, what counts once, and the account that always adds up."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from geartrain.ams.values.errors import InvalidArgument, InvalidIds, InvalidRows, StateFailed
from geartrain.ams.values.gear_messages import GearAccount
from geartrain.bridge.gear.batch_state import BatchState
from geartrain.bridge.gear.gradient_batcher import DueBatch, GradientBatcher

DIM = 3


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def batcher(gradients_per_id: int = 2, **settings: Any) -> GradientBatcher:
    return GradientBatcher(DIM, gradients_per_id=gradients_per_id, **settings)


def rows(*values: float) -> np.ndarray:
    return np.array([[value, 2 * value, -value] for value in values], np.float32)


def add(to: GradientBatcher, sequence: int, values: dict[int, float], **others: Any) -> GearAccount:
    call = {"source": "fast", "dense_version": 0, "versions": [0] * len(values)} | others
    source, versions = call.pop("source"), call.pop("versions")
    ids = np.array(list(values), np.int64)
    return to.add(source, sequence, ids, rows(*values.values()), np.array(versions, np.int64), **call)


def taken(to: GradientBatcher, limit: int | None = None) -> DueBatch:
    batch = to.due(limit)
    assert batch is not None
    return batch


def of(batch: DueBatch) -> dict[int, tuple[float, int]]:
    """First column of the gradient and the count, by id."""
    return {
        one: (float(row[0]), int(count))
        for one, row, count in zip(batch.ids.tolist(), batch.gradients, batch.counts, strict=True)
    }


def test_the_mean_of_m_gradients_is_due() -> None:
    one = batcher(2)
    add(one, 1, {7: 1.0, 8: 2.0})
    assert one.due() is None
    add(one, 2, {8: 4.0, 9: 1.0})
    batch = taken(one)
    assert of(batch) == {8: (3.0, 2)} and batch.number == 1
    np.testing.assert_array_equal(batch.gradients, rows(3.0))
    assert one.account() == GearAccount(received=4, waiting=2, due=2)
    one.done(1)
    assert one.due() is None and one.account() == GearAccount(received=4, waiting=2, applied=2)


def test_full_batches_wait_for_company() -> None:
    one = batcher(2, ids_per_update=3, reduction="sum")
    add(one, 1, {7: 1.0, 8: 1.0, 9: 1.0, 10: 1.0})
    add(one, 2, {7: 1.0, 8: 1.0})
    assert one.due() is None and one.account() == GearAccount(received=6, waiting=6)
    add(one, 3, {9: 1.0})
    assert of(taken(one)) == {7: (2.0, 2), 8: (2.0, 2), 9: (2.0, 2)}
    assert one.account() == GearAccount(received=7, waiting=1, due=6)


def test_few_ids_that_recur_do_not_wait_for_others_for_ever() -> None:
    one = batcher(2, ids_per_update=3, reduction="sum")
    for sequence in range(1, 6):
        add(one, sequence, {7: 1.0})
        assert one.due() is None
    add(one, 6, {7: 1.0})
    assert of(taken(one)) == {7: (6.0, 6)}


def test_a_flush_waits_for_no_company() -> None:
    one = batcher(2, ids_per_update=5)
    add(one, 1, {7: 1.0, 8: 1.0})
    add(one, 2, {7: 1.0})
    one.flush()
    assert of(taken(one)) == {7: (1.0, 2), 8: (1.0, 1)}
    one.done(1)
    add(one, 3, {7: 1.0})
    add(one, 4, {7: 1.0})
    assert one.due() is None


def test_a_sum_stays_a_sum() -> None:
    one = batcher(2, reduction="sum")
    add(one, 1, {8: 1.0})
    add(one, 2, {8: 4.0})
    assert of(taken(one)) == {8: (5.0, 2)}


def test_what_comes_until_it_is_taken_joins_and_what_comes_later_does_not() -> None:
    one = batcher(2, reduction="sum")
    for sequence in range(1, 4):
        add(one, sequence, {8: 1.0})
    batch = taken(one)
    add(one, 4, {8: 10.0})
    assert of(batch) == of(taken(one)) == {8: (3.0, 3)}
    one.done(batch.number)
    one.flush()
    assert of(taken(one)) == {8: (10.0, 1)} and taken(one).number == 2


def test_a_flush_makes_every_batch_due_with_its_true_count() -> None:
    one = batcher(10)
    add(one, 1, {1: 1.0, 2: 2.0})
    add(one, 2, {2: 4.0})
    one.flush()
    one.flush()
    assert of(taken(one)) == {1: (1.0, 1), 2: (3.0, 2)}


def test_a_batch_that_waits_too_long_is_due() -> None:
    clock = Clock()
    one = batcher(10, flush_seconds=5.0, clock=clock)
    add(one, 1, {1: 1.0})
    clock.now += 3
    add(one, 2, {1: 3.0, 2: 1.0})
    assert one.due() is None
    clock.now += 2
    assert of(taken(one)) == {1: (2.0, 2)}
    one.done(1)
    clock.now += 2.9
    assert one.due() is None
    clock.now += 0.2
    assert of(taken(one)) == {2: (1.0, 1)}


def test_of_many_that_wait_exactly_the_overdue_are_due() -> None:
    clock = Clock()
    one = batcher(2, flush_seconds=50.0, clock=clock)
    for sequence in range(100):
        ids = np.arange(20) + 20 * sequence
        one.add("fast", sequence, ids, np.ones((20, DIM), np.float32), ids, dense_version=0)
        clock.now += 1.0
    again = np.arange(0, 2000, 4)  # full batches, among those that wait
    one.add("fast", 100, again, np.ones((len(again), DIM), np.float32), again, dense_version=0)
    assert taken(one, 500).ids.tolist() == again.tolist()
    one.done(1)
    assert taken(one).ids.tolist() == [number for number in range(51 * 20) if number % 4]
    one.done(2)
    clock.now += 0.9
    assert one.due() is None
    clock.now += 0.1
    assert taken(one).ids.tolist() == [number for number in range(51 * 20, 52 * 20) if number % 4]


def test_a_clock_set_back_does_not_keep_a_batch_for_ever() -> None:
    clock = Clock()
    one = batcher(10, flush_seconds=5.0, clock=clock)
    add(one, 1, {1: 1.0})
    clock.now -= 500
    assert one.due() is None
    clock.now += 5
    assert of(taken(one)) == {1: (1.0, 1)}


def test_a_limit_takes_what_became_due_first() -> None:
    one = batcher(1)
    add(one, 1, {5: 1.0, 3: 1.0})
    add(one, 2, {4: 1.0})
    assert taken(one, 2).ids.tolist() == [5, 3]
    one.done(1)
    assert taken(one, 2).ids.tolist() == [4]


def test_a_retried_add_counts_once() -> None:
    one = batcher(5)
    first = add(one, 4, {1: 1.0})
    assert add(one, 4, {1: 1.0}) == first == add(one, 3, {2: 1.0})
    assert add(one, 5, {1: 1.0}).received == 2
    assert add(one, 4, {1: 1.0}, source="other").received == 1


def test_gradients_that_are_not_finite_never_reach_a_sum() -> None:
    one = batcher(2)
    for sequence, bad in enumerate((np.nan, np.inf, -np.inf), 1):
        add(one, sequence, {1: 1.0, 2: bad})
    assert of(taken(one)) == {1: (1.0, 3)}
    assert one.account() == GearAccount(received=6, due=3, non_finite=3)


def test_a_sum_beyond_float32_is_dropped_and_counted() -> None:
    one = batcher(2, reduction="sum")
    for sequence in (1, 2):
        add(one, sequence, {1: 1.0, 2: 1.5e38})
    assert of(taken(one)) == {1: (2.0, 2)}
    assert one.account() == GearAccount(received=4, due=2, non_finite=2)


def test_stale_gradients_follow_the_rule() -> None:
    def after(**settings: Any) -> tuple[dict[int, tuple[float, int]], GearAccount]:
        one = batcher(1, **settings)
        add(one, 1, {1: 12.0, 2: 12.0, 3: 12.0}, versions=[10, 7, 12], dense_version=10)
        return of(taken(one)), one.account()

    assert after() == ({1: (12.0, 1), 2: (12.0, 1), 3: (12.0, 1)}, GearAccount(received=3, due=3))
    assert after(stale="scale")[0] == {1: (12.0, 1), 2: (3.0, 1), 3: (12.0, 1)}
    assert after(stale="drop", max_gradient_lag=2) == (
        {1: (12.0, 1), 3: (12.0, 1)},
        GearAccount(received=3, due=2, dropped_stale=1),
    )


def test_a_gradient_may_be_stale_beside_one_that_is_not_finite() -> None:
    one = batcher(1, stale="drop", max_gradient_lag=2)
    values = {1: 1.0, 2: np.nan, 3: 1.0, 4: np.nan}
    add(one, 1, values, versions=[10, 10, 5, 5], dense_version=10)
    assert of(taken(one)) == {1: (1.0, 1)}
    assert one.account() == GearAccount(received=4, due=1, dropped_stale=1, non_finite=2)


def test_the_newest_learning_rate_and_the_lowest_version_travel_with_the_batch() -> None:
    one = batcher(2)
    add(one, 1, {1: 1.0}, versions=[5], dense_version=9, lr=0.1)
    add(one, 2, {1: 1.0, 2: 1.0}, versions=[3, 9], dense_version=9, lr=0.05)
    add(one, 3, {2: 1.0}, versions=[8], dense_version=9)
    batch = taken(one)
    assert batch.lr == 0.05 and batch.versions.tolist() == [3, 8]
    one.done(1)
    add(one, 4, {1: 1.0})
    one.flush()
    assert taken(one).lr is None


def test_failed_ids_leave_the_batch_and_are_counted() -> None:
    one = batcher(1)
    add(one, 1, {1: 1.0, 2: 2.0})
    batch = taken(one)
    one.failed(batch.number, {2: "no sample", 9: "no sample"})
    one.failed(batch.number, {2: "no sample"})
    assert of(taken(one)) == {1: (1.0, 1)} and taken(one).number == batch.number
    one.done(batch.number)
    one.done(batch.number)
    assert one.account() == GearAccount(received=2, applied=1, dropped_failed=1)
    assert one.report()["failures"] == {"no sample": 1}
    add(one, 2, {3: 1.0})
    one.failed(taken(one).number, {3: "no sample"})
    assert one.due() is None and one.account() == GearAccount(received=3, applied=1, dropped_failed=2)
    one.done(2)


def test_each_source_has_its_own_account() -> None:
    one = batcher(2)
    add(one, 1, {1: 1.0, 2: np.nan}, source="a")
    add(one, 1, {1: 1.0}, source="b")
    one.done(taken(one).number)
    add(one, 2, {1: 1.0}, source="b")
    assert one.account("a") == GearAccount(received=2, applied=1, non_finite=1)
    assert one.account("b") == GearAccount(received=2, applied=1, waiting=1)
    assert one.account("c") == GearAccount()
    assert one.account("a") + one.account("b") == one.account()


def test_threads_may_add_while_another_takes() -> None:
    one = batcher(2)
    sources = [f"s{number}" for number in range(4)]

    def send(source: str) -> None:
        for sequence in range(50):
            add(one, sequence, dict.fromkeys(range(20), 1.0), source=source)

    threads = [threading.Thread(target=send, args=(source,)) for source in sources]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) or one.report()["ids_due"]:
        batch = one.due(7)
        if batch is not None:
            np.testing.assert_array_equal(batch.gradients[:, 0], 1.0)
            one.done(batch.number)
    assert [one.account(source).received for source in sources] == [1000] * 4
    account = one.account()
    assert account.applied + account.waiting == 4000 and account.due == 0


def test_what_is_garbage_may_ask_for_the_account_in_the_middle_of_a_change() -> None:
    class Dropped:
        def __init__(self) -> None:
            self.circle = self

    def clock() -> float:
        gc.collect()
        return 0.0

    one = batcher(1, clock=clock)
    asked: list[GearAccount] = []
    gc.disable()
    try:
        weakref.finalize(Dropped(), lambda: asked.append(one.account()))
        adding = threading.Thread(target=add, args=(one, 1, {1: 1.0}), daemon=True)
        adding.start()
        adding.join(30)
    finally:
        gc.enable()
    assert not adding.is_alive()
    assert asked == [GearAccount()]
    assert one.account().received == 1


def no_change(call: Callable[[], object], one: GradientBatcher, error: type[Exception], match: str) -> None:
    before = one.account()
    with pytest.raises(error, match=match):
        call()
    assert one.account() == before


def test_wrong_arguments_change_nothing() -> None:
    one = batcher(1)
    ids, good = np.array([4, 4, 5]), rows(1, 2, 3)
    args: Callable[..., Sequence[Any]] = lambda i=ids, g=good, v=(0, 0, 0): ("s", 1, i, g, np.array(v))  # noqa: E731
    no_change(lambda: one.add(*args(), dense_version=0), one, InvalidIds, "id 4 occurs 2 times")
    distinct = np.array([4, 5, 6])
    no_change(lambda: one.add(*args(-distinct), dense_version=0), one, InvalidIds, "out of range")
    no_change(lambda: one.add(*args(distinct, good[:, :2]), dense_version=0), one, InvalidRows, "need \\(3, 3\\)")
    no_change(lambda: one.add(*args(distinct, good.astype(float)), dense_version=0), one, InvalidRows, "float64")
    no_change(lambda: one.add(*args(distinct, good, (0, 0)), dense_version=0), one, InvalidRows, "versions")
    no_change(lambda: one.add(*args(distinct), dense_version=0, lr=np.nan), one, InvalidArgument, "lr is nan")
    no_change(lambda: one.done(1), one, InvalidArgument, "batch 1 was never taken")
    no_change(lambda: one.due(0), one, InvalidArgument, "limit is 0")


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"ids_per_update": 0}, "ids_per_update is 0"),
        ({"ids_per_update": 0}, "ids_per_update is 0"),
        ({"gradients_per_id": 0}, "gradients_per_id is 0"),
        ({"reduction": "max"}, "reduction is 'max'"),
        ({"flush_seconds": -1}, "flush_seconds is -1"),
        ({"stale": "drop"}, "stale='drop' needs it"),
        ({"max_gradient_lag": 3}, "stale='drop' needs it"),
    ],
)
def test_wrong_settings_name_the_range(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidArgument, match=match):
        batcher(**{"gradients_per_id": 2, **settings})


def test_a_change_that_was_torn_out_half_way_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    one = batcher(1)
    with monkeypatch.context() as patch:
        patch.setattr(BatchState, "_gather", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            add(one, 1, {1: 1.0})
    with pytest.raises(StateFailed, match="torn out half-way by KeyboardInterrupt"):
        add(one, 1, {1: 1.0})
