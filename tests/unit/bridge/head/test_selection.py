"""Which classes are active."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from geartrain.ams.programs.selection import FullSoftmax, PartialFC
from geartrain.ams.values.errors import InvalidArgument


@given(
    num_classes=st.integers(1, 500),
    rate=st.floats(0.001, 1),
    step=st.integers(0, 1000),
    seed=st.integers(0, 2**64 - 1),
    data=st.data(),
)
def test_positives_are_kept_and_the_budget_is_filled(
    num_classes: int, rate: float, step: int, seed: int, data: st.DataObject
) -> None:
    labels = np.array(data.draw(st.lists(st.integers(0, num_classes - 1), min_size=1, max_size=60)), np.int64)
    before = labels.copy()
    select = PartialFC(sample_rate=rate, seed=seed)
    active = select.select(labels, num_classes, step)
    ids = active.ids
    assert ids.dtype == np.int64
    assert (np.diff(ids) > 0).all()
    assert ids[0] >= 0 and ids[-1] < num_classes
    assert len(ids) == active.num == max(select.budget(num_classes), len(set(labels.tolist())))
    np.testing.assert_array_equal(ids[active.positions(labels)], labels)
    np.testing.assert_array_equal(active.range(0, min(2, len(ids))), ids[:2])
    np.testing.assert_array_equal(select.select(labels[::-1], num_classes, step).ids, ids)
    np.testing.assert_array_equal(labels, before)


def test_steps_and_seeds_sample_other_classes() -> None:
    labels = np.array([5], np.int64)
    first = set(PartialFC(0.1).select(labels, 1000, 0).ids.tolist())
    assert first != set(PartialFC(0.1).select(labels, 1000, 1).ids.tolist())
    assert first != set(PartialFC(0.1, seed=1).select(labels, 1000, 0).ids.tolist())


def test_every_class_has_its_turn() -> None:
    counts = np.zeros(200)
    for step in range(300):
        counts[PartialFC(0.1).select(np.array([0], np.int64), 200, step).ids] += 1
    assert counts[1:].min() > 0.4 * counts[1:].mean()
    assert counts[1:].max() < 1.8 * counts[1:].mean()


def test_a_sample_of_a_huge_head_costs_what_is_active() -> None:
    started = time.process_time()
    active = PartialFC(1e-6).select(np.arange(100, dtype=np.int64), 10**10, 3)
    assert active.num == 10_000
    assert time.process_time() - started < 0.5


def test_full_softmax_holds_no_array_of_ids() -> None:
    active = FullSoftmax().select(np.array([3], np.int64), 10**12, 0)
    assert active.num == 10**12
    assert active.sorted_ids is None
    np.testing.assert_array_equal(active.range(10**11, 10**11 + 2), [10**11, 10**11 + 1])


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.1, float("nan")])
def test_an_impossible_rate_is_refused(rate: float) -> None:
    with pytest.raises(InvalidArgument, match="sample_rate"):
        PartialFC(sample_rate=rate)
