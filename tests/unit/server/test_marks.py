"""Marks make a retried write apply once."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from geartrain.ams.errors import InvalidArgument, NonFinite, StaleClient
from geartrain.ams.messages import CallContext, Done, Reply
from geartrain.ams.server.marks import WINDOW, WriteMarks


def context(sequence: int, oldest: int = 1, incarnation: int = 1) -> CallContext:
    return CallContext(stream="s", sequence=sequence, oldest_unacknowledged=oldest, incarnation=incarnation)


def future() -> Future[Reply]:
    return Future()


def test_a_duplicate_of_an_applied_write_gets_the_first_reply() -> None:
    marks, first, again = WriteMarks(), future(), future()
    assert marks.admit(context(1), first)
    marks.applied(context(1), Done(created=3))
    assert first.result(0) == Done(created=3)
    assert not marks.admit(context(1), again)
    assert again.result(0) == Done(created=3, duplicate=True)


def test_a_duplicate_of_a_write_in_flight_joins_it() -> None:
    marks, first, again = WriteMarks(), future(), future()
    assert marks.admit(context(1), first)
    assert not marks.admit(context(1), again)
    assert not again.done()
    marks.applied(context(1), Done(created=2))
    assert first.result(0) == again.result(0) == Done(created=2)


def test_a_failed_write_leaves_no_mark() -> None:
    marks, first = WriteMarks(), future()
    marks.admit(context(1), first)
    marks.failed(context(1), NonFinite("bad"))
    with pytest.raises(NonFinite):
        first.result(0)
    assert marks.admit(context(1), future())


def test_an_acknowledged_write_is_forgotten_and_refused() -> None:
    marks = WriteMarks()
    marks.admit(context(1), future())
    marks.applied(context(1), Done())
    marks.admit(context(2, oldest=2), future())
    with pytest.raises(StaleClient, match="acknowledged already"):
        marks.admit(context(1, oldest=1), future())


def test_the_key_is_the_stream_not_the_process() -> None:
    marks = WriteMarks()
    marks.admit(context(1, incarnation=1), future())
    marks.applied(context(1), Done(created=1))
    retried = future()
    assert not marks.admit(context(1, incarnation=2), retried)
    assert retried.result(0) == Done(created=1, duplicate=True)


def test_a_superseded_process_is_fenced() -> None:
    marks = WriteMarks()
    marks.admit(context(1, incarnation=2), future())
    with pytest.raises(StaleClient, match="superseded by 2"):
        marks.admit(context(2, incarnation=1), future())


def test_a_client_may_not_run_further_ahead_than_the_window() -> None:
    with pytest.raises(InvalidArgument, match=str(WINDOW)):
        WriteMarks().admit(context(WINDOW + 1), future())


@pytest.mark.parametrize("nameless", [CallContext(), CallContext(stream="s"), CallContext(sequence=1)])
def test_a_write_without_a_name_is_refused(nameless: CallContext) -> None:
    with pytest.raises(InvalidArgument, match="stream"):
        WriteMarks().admit(nameless, future())
