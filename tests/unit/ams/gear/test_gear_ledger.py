"""What became of gradients: the ledger of a fast gear, while slow gears come and go in any order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.ams.gear.client.ledger import GearLedger
from geartrain.ams.values.gear_messages import Failure, GearAccount, GearState, first_error, process_at


def state(address: str, number: int, account: GearAccount, *, taken_over: tuple[str, ...] = ()):
    return GearState(
        name="image",
        dim=4,
        address=address,
        process=process_at(address, number),
        partitions=(),
        dense_version=1,
        cache_hits=0,
        cache_misses=0,
        queued_ids=0,
        account=account,
        uptime_seconds=0.0,
        taken_over=taken_over,
    )


def told(received: int, waiting: int) -> GearAccount:
    return GearAccount(received=received, waiting=waiting // 2, due=waiting - waiting // 2, applied=received - waiting)


def test_what_died_in_memory_is_lost_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    ledger = GearLedger("image")
    ledger.update([state("a", 1, told(10, 4)), state("b", 1, told(7, 7))], [])
    assert ledger.knows_gone(["a"]) and not ledger.knows_gone(["a", "b", "c"])
    ledger.update([state("a", 1, told(12, 5))], [])
    assert ledger.total() == GearAccount(received=19, waiting=2, due=3, applied=7, lost=7)
    assert "slow gear b of 'image' is gone: 7 gradients" in caplog.text
    ledger.update([state("a", 1, told(12, 0)), state("b", 2, told(3, 3))], [])  # its successor begins anew
    assert ledger.total() == GearAccount(received=22, waiting=1, due=2, applied=12, lost=7)


def test_one_that_only_seemed_to_be_gone_has_lost_nothing() -> None:
    ledger = GearLedger("image")
    ledger.record("a#1", told(10, 4))
    ledger.update([], ["a"])  # it does not answer
    assert ledger.total() == told(10, 4)
    ledger.update([], [])
    assert ledger.total().lost == 4
    ledger.update([state("a", 1, told(12, 5))], [])
    assert ledger.total() == told(12, 5)
    ledger.update([], [])
    ledger.record("a#1", told(13, 5))
    assert ledger.total() == told(13, 5)
    ledger.update([state("b", 1, told(15, 0), taken_over=("a#1",))], [])
    assert ledger.total() == told(15, 0)  # of both: it has handed its account over


@settings(deadline=None)
@given(st.data())
def test_it_adds_up_whoever_dies(data: st.DataObject) -> None:
    ledger, gears = GearLedger("image"), dict.fromkeys("abc", GearAccount())
    numbers = dict.fromkeys("abc", 1)
    delivered = 0
    for _ in range(data.draw(st.integers(1, 12))):
        name = data.draw(st.sampled_from(sorted(gears)))
        if data.draw(st.booleans()):
            count, applied = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 5))
            before = gears[name]
            waiting = before.waiting + count
            applied = min(applied, waiting)
            gears[name] = GearAccount(
                received=before.received + count, waiting=waiting - applied, applied=before.applied + applied
            )
            ledger.record(process_at(name, numbers[name]), gears[name])
            delivered += count
        else:
            gears[name], numbers[name] = GearAccount(), numbers[name] + 1
            ledger.update([state(number, numbers[number], account) for number, account in gears.items()], [])
        assert ledger.total().adds_up and ledger.total().received == delivered


def test_one_error_stands_for_all_failures() -> None:
    failures = {number: Failure("SampleNotFound", f"id {number} has no sample") for number in range(5, 20)}
    error = first_error(failures, "that")
    assert str(error).startswith("id 5 has no sample (and that of 14 more: 6, 7, 8")
    unknown = first_error({1: Failure("SomethingNewer", "id 1 is odd")}, "that")
    assert type(unknown).__name__ == "InternalError"
