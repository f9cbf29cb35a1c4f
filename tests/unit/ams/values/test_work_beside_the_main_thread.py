"""Work that Ctrl-C does not break off: who does it, what comes back, and whose the arrays are afterwards."""

from __future__ import annotations

import concurrent.futures
import gc
import multiprocessing
import os
import queue
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from geartrain.ams.values import interrupts as module
from geartrain.ams.values.interrupts import BackgroundFuture, BufferLease, CallerGone, uninterrupted


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def other() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as executor:
        yield executor


def test_the_main_thread_leaves_work_to_another_and_others_do_it_themselves(other: ThreadPoolExecutor) -> None:
    assert uninterrupted(threading.get_ident) != threading.get_ident()

    def there() -> bool:
        return uninterrupted(threading.get_ident) == threading.get_ident()

    assert other.submit(there).result(10)


def test_one_thread_does_all_of_it() -> None:
    assert len({uninterrupted(threading.get_ident) for _ in range(20)}) == 1


def test_errors_come_back() -> None:
    def fail() -> None:
        raise KeyError("lost")

    for _ in range(2):
        with pytest.raises(KeyError, match="lost"):
            uninterrupted(fail)
    assert uninterrupted(lambda: 7) == 7


def test_what_is_broken_off_goes_on_and_the_next_call_does_not_wait_for_it() -> None:
    go_on, done, told = threading.Event(), threading.Event(), []

    def work() -> None:
        interrupt()
        assert go_on.wait(20)
        done.set()

    with pytest.raises(KeyboardInterrupt):
        uninterrupted(work, on_interrupt=lambda: told.append(done.is_set()))
    assert told == [False]
    assert uninterrupted(lambda: 7) == 7
    go_on.set()
    assert done.wait(20)


def test_what_a_signal_handler_raises_is_no_reason_to_do_the_work_again() -> None:
    """PyTorch's raises RuntimeError when a worker of a DataLoader dies."""
    go_on, done = threading.Event(), queue.SimpleQueue[int]()

    def work() -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert go_on.wait(20)
        done.put(threading.get_ident())

    def handler(*_: object) -> None:
        raise RuntimeError("DataLoader worker is killed")

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(RuntimeError, match="DataLoader"):
            uninterrupted(work)
    finally:
        signal.signal(signal.SIGUSR1, before)
    go_on.set()
    assert done.get(timeout=20) != threading.get_ident()
    uninterrupted(lambda: None)
    assert done.empty()


def test_without_threads_the_work_is_done_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(module, "_idle", [])
    monkeypatch.setattr(module._thread, "start_new_thread", none)
    assert uninterrupted(threading.get_ident) == threading.get_ident()


def test_a_forked_child_has_threads_of_its_own() -> None:
    uninterrupted(lambda: None)
    child = multiprocessing.get_context("fork").Process(target=uninterrupted, args=(lambda: os._exit(7),))
    child.start()
    child.join(20)
    assert child.exitcode == 7


def test_nobody_touches_arrays_whose_owner_has_gone(other: ThreadPoolExecutor) -> None:
    buffer_lease, began, go_on = BufferLease(), threading.Semaphore(0), threading.Event()
    written = []

    def write() -> None:
        with buffer_lease.held():
            began.release()
            while not buffer_lease.has_ended:  # a write that waits for something looks
                go_on.wait(0.001)
            written.append(1)

    both = [other.submit(write) for _ in range(2)]
    assert all(began.acquire(timeout=20) for _ in both)  # side by side: they touch different parts
    buffer_lease.revoke()
    buffer_lease.wait()
    assert written == [1, 1]  # they were at it: the end has waited for them
    for item in both:
        item.result(20)
    with pytest.raises(CallerGone):
        other.submit(write).result(20)
    assert written == [1, 1]


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


def test_a_callback_of_a_background_future_may_ask_for_its_result(other: ThreadPoolExecutor) -> None:
    found: queue.SimpleQueue[object] = queue.SimpleQueue()
    for work in (lambda: 7, fail):
        future = BackgroundFuture(work)
        future.add_done_callback(lambda done: found.put((done.done(), done.exception(), done.cancelled())))
        other.submit(future.run)
        assert found.get(timeout=20) == (True, future.exception(20), False)
    cancelled = BackgroundFuture(fail)
    cancelled.add_done_callback(lambda done: found.put((done.done(), done.cancelled())))
    assert cancelled.cancel()
    assert found.get(timeout=20) == (True, True)


def test_a_failed_background_future_does_not_keep_its_arguments() -> None:
    class Rows:
        pass

    rows = Rows()
    gone = weakref.ref(rows)

    def work(_: Rows) -> None:
        raise KeyError("lost")

    future = BackgroundFuture(partial(work, rows))
    del rows
    gc.disable()
    try:
        future.run()
        with pytest.raises(KeyError):
            future.result()
        del future
        assert gone() is None
    finally:
        gc.enable()


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
