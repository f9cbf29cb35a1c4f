"""The live classes of a head, against a plain mask."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from geartrain.ams.programs.class_lifecycle import LiveClasses
from geartrain.ams.programs.selection import FullSoftmax, PartialFC
from geartrain.ams.values.errors import ConfigError, InvalidArgument, InvalidIds
from geartrain.serving.index.distributed_index import bounds


def mask_of(live: LiveClasses) -> np.ndarray:
    mask = np.ones(live.num_classes, np.bool_)
    for start, stop in live.retired_runs:
        mask[start:stop] = False
    return mask


@given(st.integers(1, 40), st.lists(st.lists(st.integers(0, 39), max_size=12), max_size=5))
def test_runs_say_what_a_mask_would(num_classes: int, changes: list[list[int]]) -> None:
    live, mask = LiveClasses(num_classes), np.ones(num_classes, np.bool_)
    for turn, change in enumerate(changes):
        wanted = np.unique([item for item in change if item < num_classes]).astype(np.int64)
        if turn % 2:
            wanted = wanted[~mask[wanted]]
            live = live.with_added(wanted)
            mask[wanted] = True
        else:
            wanted = wanted[mask[wanted]]
            if len(wanted) == mask.sum():
                with pytest.raises(InvalidArgument, match="keep at least one"):
                    live.without(wanted)
                continue
            live = live.without(wanted)
            mask[wanted] = False
        ids = np.flatnonzero(mask)
        everything = np.arange(num_classes)
        np.testing.assert_array_equal(mask_of(live), mask)
        np.testing.assert_array_equal(live.holds(everything), mask)
        np.testing.assert_array_equal(live.all_ids, ids)
        np.testing.assert_array_equal(live.numbers(ids), np.arange(len(ids)))
        np.testing.assert_array_equal(live.free_ids(int((~mask).sum())), np.flatnonzero(~mask))
        again = LiveClasses(num_classes, live.retired_runs.tolist())
        assert again.fingerprint == live.fingerprint
        assert (live.fingerprint == 0) == mask.all()


@pytest.mark.parametrize(
    "runs", [[[3, 3]], [[5, 4]], [[0, 2], [2, 4]], [[4, 6], [1, 2]], [[-1, 2]], [[8, 11]], [[0, 10]], [[1, 2, 3]]]
)
def test_runs_that_cannot_be_are_refused(runs: list[list[int]]) -> None:
    with pytest.raises(InvalidArgument):
        LiveClasses(10, runs)


def test_a_retired_label_is_named_with_a_remedy() -> None:
    live = LiveClasses(10, [[3, 5]])
    with pytest.raises(InvalidIds, match=r"label 4 at index 1 .*no live class.*add_classes"):
        live.require(np.array([2, 4]), "label")
    with pytest.raises(InvalidArgument, match="3 classes were to be added, and 2 of 10"):
        live.free_ids(3)
    with pytest.raises(InvalidArgument, match=r"num_live_classes is 11; it must lie in \[1, 10\]"):
        LiveClasses.first(10, 11)


@given(st.integers(0, 2**32), st.integers(0, 1000))
def test_a_selection_is_of_the_living_and_a_function_of_its_arguments(seed: int, step: int) -> None:
    live = LiveClasses(500, [[7, 9], [100, 220], [499, 500]])
    labels = np.array([6, 9, 220, 220, 498])
    active = live.select(PartialFC(0.2, seed=seed), labels, step)
    assert active.num == round(0.2 * live.num_live_classes) == len(np.unique(active.ids))
    assert live.holds(active.ids).all()
    np.testing.assert_array_equal(active.ids[active.positions(labels)], labels)
    again = LiveClasses(500, live.retired_runs).select(PartialFC(0.2, seed=seed), labels, step)
    np.testing.assert_array_equal(again.ids, active.ids)


def test_the_full_softmax_is_over_the_live() -> None:
    live = LiveClasses(12, [[0, 3], [8, 9]])
    assert live.select(FullSoftmax(), np.array([3]), 0).ids.tolist() == [3, 4, 5, 6, 7, 9, 10, 11]


def test_the_living_classes_are_cut_into_parts_that_are_disjoint_and_whole() -> None:
    live = LiveClasses(20, [[0, 2], [5, 9], [18, 20]])
    for of in (1, 2, 3, 12):
        parts = [live.between(*bounds(live.num_live_classes, number, of)) for number in range(1, of + 1)]
        assert np.concatenate([part.all_ids for part in parts]).tolist() == live.all_ids.tolist()
        assert max(part.num_live_classes for part in parts) - min(part.num_live_classes for part in parts) <= 1
    with pytest.raises(ConfigError, match="part 1/13 would be of 12 classes; make 12 parts at most"):
        bounds(live.num_live_classes, 1, 13)
