"""What a sample's user did before it: nothing later, nothing held out, and the latest of it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

import geartrain as gt
from geartrain.workers.ctr.samples.click_samples import ClickSamples, SampleSchema, split
from geartrain.workers.ctr.samples.histories import Histories, histories_before


def history_of(histories: Histories, sample: int) -> list[tuple[int, int]]:
    places, offsets = histories.take(np.array([sample]))
    assert offsets.tolist() == [0, len(places)]
    return list(zip(histories.items[places].tolist(), histories.outcomes[places].tolist(), strict=True))


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6), st.booleans()), min_size=1, max_size=40),
    st.integers(1, 5),
)
def test_a_history_is_the_latest_earlier_events_of_the_user(rows: list[tuple[int, int, bool]], length: int) -> None:
    users, times = (np.array(column, np.int64) for column in list(zip(*rows, strict=True))[:2])
    items, outcomes = np.arange(len(rows)), np.arange(len(rows)) % 3
    events = np.flatnonzero([is_event for *_, is_event in rows])
    histories = histories_before(users, items, outcomes, times, events=events, length=length)
    for sample in range(len(rows)):
        before = [event for event in events if users[event] == users[sample] and times[event] < times[sample]]
        before.sort(key=lambda one: times[one])
        assert history_of(histories, sample) == [(items[item], outcomes[item]) for item in before[-length:]]


def samples_of(number: int) -> ClickSamples:
    rng = np.random.default_rng(0)
    ids: npt.NDArray[np.int64] = rng.integers(0, 9, (2, number))
    return ClickSamples(
        fields={"user": ids[0], "item": np.arange(number)},  # an item names its sample
        clicks=rng.integers(0, 2, number).astype(np.float32),
        times=rng.integers(0, number // 2, number),
        schema=SampleSchema(item=("item",), user="user"),
    )


@pytest.mark.parametrize("kind", ["random", "time"])
@pytest.mark.parametrize("validation", [False, True])
def test_no_history_holds_what_is_to_be_told_or_what_comes_later(kind: str, validation: bool) -> None:
    samples = samples_of(500)
    assert samples.times is not None
    train, test = split(samples, kind, 1, history=7, validation=validation)
    may_know = set(train.fields["item"].tolist())
    seen = 0
    for part in (train, test):
        assert part.histories is not None
        for sample in range(len(part)):
            own = part.fields["item"][sample]
            for item, outcome in history_of(part.histories, sample):
                assert item in may_know
                assert samples.times[item] < samples.times[own]
                assert samples.fields["user"][item] == samples.fields["user"][own]
                assert outcome == samples.clicks[item]
                seen += 1
    assert seen > 500


def test_fresh_histories_go_on_through_what_is_held_out_and_no_further() -> None:
    samples = samples_of(500)
    assert samples.times is not None
    train, test = split(samples, "time", 1, history=500, fresh=True)
    stale = split(samples, "time", 1, history=500)[1]
    assert train.histories is not None and test.histories is not None and stale.histories is not None
    users, times = samples.fields["user"], samples.times
    for part in (train, test):
        assert part.histories is not None
        for sample, own in enumerate(part.fields["item"]):
            earlier = np.flatnonzero((users == users[own]) & (times < times[own]))
            assert {item for item, _ in history_of(part.histories, sample)} == set(earlier.tolist())
    assert (test.histories.end - test.histories.begin).sum() > (stale.histories.end - stale.histories.begin).sum()
    with pytest.raises(gt.errors.ConfigError, match="set split=time"):
        split(samples, "random", 1, history=5, fresh=True)


def test_samples_without_users_or_times_have_no_histories() -> None:
    samples = samples_of(20)
    unknown = ClickSamples(fields=samples.fields, clicks=samples.clicks, times=None, schema=samples.schema)
    with pytest.raises(gt.errors.ConfigError, match="take a model without: deepfm, wide_deep or dssm"):
        split(unknown, "random", 0, history=3)
    with pytest.raises(gt.errors.ConfigError, match="the samples have no times"):
        split(unknown, "time", 0)
