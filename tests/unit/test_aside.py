"""Work that Ctrl-C does not break off: who does it, what comes back, and whose the arrays are afterwards."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from geartrain.ams import aside as module
from geartrain.ams.aside import BackgroundFuture, BrokenOff, Leave, aside, held


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def other() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as executor:
        yield executor


def test_the_main_thread_leaves_work_to_another_and_others_do_it_themselves(other: ThreadPoolExecutor) -> None:
    assert aside(threading.get_ident) != threading.get_ident()

    def there() -> bool:
        return aside(threading.get_ident) == threading.get_ident()

    assert other.submit(there).result(10)


def test_one_thread_does_all_of_it() -> None:
    assert len({aside(threading.get_ident) for _ in range(20)}) == 1


def test_errors_come_back() -> None:
    def fail() -> None:
        raise KeyError("lost")

    for _ in range(2):
        with pytest.raises(KeyError, match="lost"):
            aside(fail)
    assert aside(lambda: 7) == 7


def test_what_is_broken_off_goes_on_and_the_next_call_does_not_wait_for_it() -> None:
    go_on, done, told = threading.Event(), threading.Event(), []

    def work() -> None:
        interrupt()
        assert go_on.wait(20)
        done.set()

    with pytest.raises(KeyboardInterrupt):
        aside(work, if_broken_off=lambda: told.append(done.is_set()))
    assert told == [False]
    assert aside(lambda: 7) == 7
    go_on.set()
    assert done.wait(20)


def test_without_threads_the_work_is_done_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(module, "_idle", [])
    monkeypatch.setattr(module._thread, "start_new_thread", none)
    assert aside(threading.get_ident) == threading.get_ident()


def test_a_forked_child_has_threads_of_its_own() -> None:
    aside(lambda: None)
    child = multiprocessing.get_context("fork").Process(target=aside, args=(lambda: os._exit(7),))
    child.start()
    child.join(20)
    assert child.exitcode == 7


def test_nobody_writes_into_arrays_whose_owner_has_gone(other: ThreadPoolExecutor) -> None:
    leave, began, go_on = Leave(), threading.Event(), threading.Event()
    written = []

    def write() -> None:
        with leave:
            leave.on_end(go_on.set)  # a write that waits for something is told
            began.set()
            assert go_on.wait(20)
            written.append(1)

    first = other.submit(write)
    assert began.wait(20)
    second = other.submit(write)
    leave.end()
    assert written == [1]  # it was at it: the end has waited for it
    first.result(20)
    for late in (second, other.submit(write)):
        with pytest.raises(BrokenOff):
            late.result(20)
    assert written == [1]


def test_a_write_that_is_over_is_not_told_of_the_end() -> None:
    leave, told = Leave(), []
    with held(leave):
        leave.on_end(lambda: told.append(1))
    leave.end()
    assert told == []
    with held(None):
        pass


def test_a_write_that_begins_as_its_owner_goes_is_told(other: ThreadPoolExecutor) -> None:
    leave, told = Leave(), threading.Event()

    def write() -> None:
        with leave:
            leave._has_ended = True  # between the beginning and on_end
            leave.on_end(told.set)

    other.submit(write).result(20)
    assert told.is_set()


def fail() -> None:
    raise KeyError("lost")


@pytest.mark.parametrize("wait", [lambda future: future.result(20), lambda future: future.exception(20)])
def test_background_futures_are_futures(other: ThreadPoolExecutor, wait: Callable[[BackgroundFuture], object]) -> None:
    good, bad = BackgroundFuture(lambda: 7), BackgroundFuture(fail)
    with pytest.raises(concurrent.futures.TimeoutError):
        good.result(0.001)
    with pytest.raises(concurrent.futures.TimeoutError):
        good.exception(0)
    called = []
    bad.add_done_callback(called.append)
    for future in (good, bad):
        other.submit(future.run)
    assert set(concurrent.futures.wait([good, bad], 20).done) == {good, bad}
    assert good.result() == 7 and good.exception() is None and good.result(0) == 7
    assert isinstance(bad.exception(), KeyError) and called == [bad]
    with pytest.raises(KeyError):
        bad.result()
    wait(good)


def test_a_cancelled_background_future_does_nothing() -> None:
    done = []
    future = BackgroundFuture(lambda: done.append(1))
    assert future.cancel() and future.cancel()
    future.run()
    assert done == []
    with pytest.raises(concurrent.futures.CancelledError):
        future.result(20)
    finished = BackgroundFuture(lambda: 7)
    finished.run()
    assert not finished.cancel() and finished.result() == 7


def test_ctrl_c_breaks_off_the_wait_for_a_background_future_and_not_the_future(other: ThreadPoolExecutor) -> None:
    go_on, waits = threading.Event(), threading.Event()

    def work() -> int:
        assert waits.wait(20)
        interrupt()
        assert go_on.wait(20)
        return 7

    future = BackgroundFuture(work)
    other.submit(future.run)
    with pytest.raises(KeyboardInterrupt):
        waits.set()
        future.result()
    go_on.set()
    assert future.result(20) == 7
