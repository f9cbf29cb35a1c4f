"""Completed writes make a retried one apply once."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from geartrain.ams.kernels._core import CompletedWrites
from geartrain.ams.server.freeze.dedup import CompletedWrite, StreamWrites
from geartrain.ams.values.errors import InvalidArgument, NonFinite, StaleClient
from geartrain.ams.values.shard_messages import WRITE_WINDOW, CallContext, Done, Reply


def context(sequence: int, oldest: int = 1, incarnation: int = 1) -> CallContext:
    return CallContext(stream="s", sequence=sequence, oldest_unacknowledged=oldest, incarnation=incarnation)


def future() -> Future[Reply]:
    return Future()


def test_a_duplicate_of_an_applied_write_gets_the_first_reply() -> None:
    writes, first, again = CompletedWrites(), future(), future()
    assert writes.admit(context(1), first)
    writes.applied(context(1), Done(created=3), "t")
    assert first.result(0) == Done(created=3)
    assert not writes.admit(context(1), again)
    assert again.result(0) == Done(created=3, duplicate=True)


def test_a_duplicate_of_a_write_in_flight_joins_it() -> None:
    writes, first, again = CompletedWrites(), future(), future()
    assert writes.admit(context(1), first)
    assert not writes.admit(context(1), again)
    assert not again.done()
    writes.applied(context(1), Done(created=2), "t")
    assert first.result(0) == again.result(0) == Done(created=2)


def test_a_failed_write_leaves_no_mark() -> None:
    writes, first = CompletedWrites(), future()
    writes.admit(context(1), first)
    writes.failed(context(1), NonFinite("bad"))
    with pytest.raises(NonFinite):
        first.result(0)
    assert writes.admit(context(1), future())


def test_an_acknowledged_write_is_forgotten_and_refused() -> None:
    writes = CompletedWrites()
    writes.admit(context(1), future())
    writes.applied(context(1), Done(), "t")
    writes.admit(context(2, oldest=2), future())
    with pytest.raises(StaleClient, match="acknowledged already"):
        writes.admit(context(1, oldest=1), future())


def test_the_key_is_the_stream_not_the_process() -> None:
    writes = CompletedWrites()
    writes.admit(context(1, incarnation=1), future())
    writes.applied(context(1), Done(created=1), "t")
    retried = future()
    assert not writes.admit(context(1, incarnation=2), retried)
    assert retried.result(0) == Done(created=1, duplicate=True)


def test_a_superseded_process_is_fenced() -> None:
    writes = CompletedWrites()
    writes.admit(context(1, incarnation=2), future())
    with pytest.raises(StaleClient, match="superseded by 2"):
        writes.admit(context(2, incarnation=1), future())


def test_a_client_may_not_run_further_ahead_than_the_window() -> None:
    assert CompletedWrites().admit(context(WRITE_WINDOW), future())
    with pytest.raises(InvalidArgument, match=str(WRITE_WINDOW)):
        CompletedWrites().admit(context(WRITE_WINDOW + 1), future())


@pytest.mark.parametrize("nameless", [CallContext(), CallContext(stream="s"), CallContext(sequence=1)])
def test_a_write_without_a_name_is_refused(nameless: CallContext) -> None:
    with pytest.raises(InvalidArgument, match="stream"):
        CompletedWrites().admit(nameless, future())


def named(stream: str, sequence: int, incarnation: int, oldest: int = 0) -> CallContext:
    return CallContext(stream=stream, sequence=sequence, incarnation=incarnation, oldest_unacknowledged=oldest)


def test_a_fence_shuts_out_lower_incarnations_of_the_job_and_nobody_else() -> None:
    writes = CompletedWrites()
    writes.admit(named("job/rank0", 1, incarnation=1), future())
    writes.applied(named("job/rank0", 1, incarnation=1), Done(), "t")
    writes.fence("job", 5, forget=False)
    for stream in ("job", "job/rank0", "job/rank0/table/t"):
        with pytest.raises(StaleClient, match=r"superseded by incarnation 5 of 'job'|superseded by 5"):
            writes.admit(named(stream, 2, incarnation=4), future())
    assert writes.admit(named("job/rank0", 2, incarnation=5), future())
    assert writes.admit(named("jobs/rank0", 1, incarnation=4), future())
    writes.fence("job", 5, forget=False)
    with pytest.raises(StaleClient):
        writes.fence("job/rank0", 4, forget=False)


def test_a_job_that_goes_on_keeps_its_completed_writes_and_one_that_goes_back_does_not() -> None:
    writes = CompletedWrites()
    writes.admit(named("job/rank0", 3, incarnation=1, oldest=2), future())
    writes.applied(named("job/rank0", 3, incarnation=1), Done(created=7), "t")
    writes.fence("job", 2, forget=False)
    again = future()
    assert not writes.admit(named("job/rank0", 3, incarnation=2), again)
    assert again.result(0) == Done(created=7, duplicate=True)
    writes.fence("job", 3, forget=True)
    assert writes.admit(named("job/rank0", 1, incarnation=3), future())
    assert writes.admit(named("job/rank0", 3, incarnation=3), future())


def test_a_fence_that_arrives_late_forgets_nothing_of_those_it_let_in() -> None:
    writes = CompletedWrites()
    for sequence, incarnation in ((1, 1), (2, 2)):
        writes.admit(named("job/rank0", sequence, incarnation), future())
        writes.applied(named("job/rank0", sequence, incarnation), Done(), "t")
    writes.fence("job", 2, forget=True)
    assert not writes.admit(named("job/rank0", 2, incarnation=2), future())
    assert writes.admit(named("job/rank0", 1, incarnation=2), future())


def test_a_fence_that_arrives_twice_forgets_nothing_of_what_was_restored_meanwhile() -> None:
    writes, again = CompletedWrites(), future()
    writes.fence("s", 2, forget=False)
    writes.fence("s", 2, forget=True)
    writes.restore("s", StreamWrites(1, 3, [CompletedWrite(4, 1, "t")]), {"t"})
    writes.fence("s", 2, forget=True)
    assert not writes.admit(context(4, oldest=3, incarnation=2), again)
    assert again.result(0) == Done(created=1, duplicate=True)
    writes.fence("s", 3, forget=True)  # the next one goes back
    assert writes.admit(context(4, oldest=3, incarnation=3), future())


def test_a_stream_that_began_anew_since_a_snapshot_keeps_its_numbers_when_that_is_restored() -> None:
    writes = CompletedWrites()
    writes.fence("s", 2, forget=True)
    assert writes.admit(context(1, incarnation=2), future())
    writes.applied(context(1, incarnation=2), Done(), "u")
    writes.restore("s", StreamWrites(1, 50, []), {"t"})
    assert writes.admit(context(2, oldest=1, incarnation=2), future())
    writes.restore("other", StreamWrites(1, 50, []), {"t"})
    with pytest.raises(StaleClient, match="acknowledged already"):
        writes.admit(named("other", 49, incarnation=1, oldest=1), future())


def test_completed_writes_of_another_cluster_shut_out_nobody_and_are_forgotten_with_the_next_return() -> None:
    writes = CompletedWrites()
    writes.fence("s", 5, forget=True)  # the job goes back; it was numbered higher where the snapshot was taken
    writes.restore("s", StreamWrites(1000, 2, [CompletedWrite(2, 7, "t")]), {"t"})
    again = future()
    assert not writes.admit(context(2, incarnation=5), again)
    assert again.result(0) == Done(created=7, duplicate=True)
    writes.fence("s", 6, forget=True)
    assert writes.admit(context(1, incarnation=6), future())
    assert writes.admit(context(2, incarnation=6), future())  # else a step would be taken for done and be lost


def test_a_stream_that_was_silent_for_too_many_others_is_refused_until_its_job_begins_anew() -> None:
    writes = CompletedWrites(max_streams=3)
    written, again = named("job/rank0", 5, incarnation=1), future()
    writes.admit(written, future())
    writes.applied(written, Done(created=1), "t")
    writes.admit(named("waits", 1, incarnation=1), future())
    for other in ("a", "b"):
        writes.admit(named(other, 1, incarnation=1), future())
        writes.applied(named(other, 1, incarnation=1), Done(), "t")
    with pytest.raises(StaleClient, match="'job/rank0' wrote nothing here while 3 others did"):
        writes.admit(written, future())
    assert set(dict(writes.streams({"t"}))) == {"a", "b"}
    assert not writes.admit(named("waits", 1, incarnation=1), again)  # one in flight is never forgotten
    writes.restore("job/rank0", StreamWrites(1, 3, []), {"t"})
    assert "job/rank0" not in dict(writes.streams({"t"}))
    with pytest.raises(StaleClient, match="wrote nothing"):
        writes.admit(written, future())
    writes.fence("job", 1, forget=True)  # not of its past
    with pytest.raises(StaleClient, match="wrote nothing"):
        writes.admit(written, future())
    writes.fence("job", 2, forget=True)
    assert writes.admit(named("job/rank0", 5, incarnation=2), future())


def test_a_stream_that_goes_on_writing_is_not_forgotten_for_others() -> None:
    writes, again = CompletedWrites(max_streams=2, max_forgotten=5), future()
    writes.admit(named("mine", 1, incarnation=1), future())
    writes.applied(named("mine", 1, incarnation=1), Done(created=4), "t")
    for number in range(20):
        writes.admit(named(f"other{number}", 1, incarnation=1), future())
        writes.applied(named(f"other{number}", 1, incarnation=1), Done(), "t")
        writes.admit(named("mine", number + 2, incarnation=1), future())
        writes.applied(named("mine", number + 2, incarnation=1), Done(), "t")
    assert not writes.admit(named("mine", 1, incarnation=1), again)
    assert again.result(0) == Done(created=4, duplicate=True)
    assert writes.num_forgotten_streams <= 6


def write(writes: CompletedWrites, stream: str, sequence: int = 1, *, table: str = "t") -> bool:
    """Whether the write was new."""
    context, reply = named(stream, sequence, incarnation=1), future()
    if is_new := writes.admit(context, reply):
        writes.applied(context, Done(created=sequence), table)
    assert reply.result(0) == Done(created=sequence, duplicate=not is_new)
    return is_new


def test_a_stream_with_a_write_in_flight_is_never_forgotten() -> None:
    writes, reply = CompletedWrites(max_streams=2), future()
    writes.admit(named("waits", 1, incarnation=1), reply)
    for other in ("a", "b", "c"):
        write(writes, other)
    assert set(dict(writes.streams({"t"}))) == {"c"}
    writes.applied(named("waits", 1, incarnation=1), Done(created=1), "t")
    assert reply.result(0) == Done(created=1)
    write(writes, "d")  # now it is the one that wrote last but one
    assert set(dict(writes.streams({"t"}))) == {"waits", "d"}
    write(writes, "e")
    assert set(dict(writes.streams({"t"}))) == {"d", "e"}


def test_a_stream_that_only_repeats_itself_is_not_forgotten_for_others() -> None:
    writes = CompletedWrites(max_streams=2)
    assert write(writes, "mine")
    for number in range(3):
        write(writes, f"other{number}")
        assert not write(writes, "mine")


def test_writes_to_a_table_that_was_dropped_are_told_from_those_to_the_next_of_its_name() -> None:
    writes = CompletedWrites()
    assert write(writes, "s", 1)
    assert write(writes, "s", 2, table="u")
    writes.dropped("t")
    assert write(writes, "s", 3)
    assert not write(writes, "s", 2)
    assert not write(writes, "s", 3)
    with pytest.raises(StaleClient, match="was applied to a table that was dropped since"):
        writes.admit(named("s", 1, incarnation=1), future())
    assert dict(writes.streams({"t"})) == {"s": (1, 0, [(3, 3, "t")])}
    writes.restore(
        "s", StreamWrites(1, 0, [CompletedWrite(1, 1, "t")]), {"t"}
    )  # the rows that it changed are there again
    assert not write(writes, "s", 1)


def test_what_is_acknowledged_takes_no_memory() -> None:
    writes = CompletedWrites()
    for sequence in range(1, 5):
        write(writes, "s", sequence)
    writes.admit(named("s", 5, incarnation=1, oldest=3), future())
    assert dict(writes.streams({"t"})) == {"s": (1, 3, [(3, 3, "t"), (4, 4, "t")])}


def test_the_highest_incarnation_is_that_of_any_write_fence_or_mark() -> None:
    writes = CompletedWrites()
    writes.admit(named("s", 1, incarnation=3), future())
    assert writes.highest_incarnation == 3
    writes.fence("job", 5, forget=False)
    assert writes.highest_incarnation == 5
    writes.restore("other", StreamWrites(9, 0, []), {"t"})
    write(writes, "third")
    assert writes.highest_incarnation == 9
