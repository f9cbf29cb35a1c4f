"""The turn of a shard: given in the order in which it was asked for, without holding the interpreter up."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest

from geartrain.ams.kernels._core import Turn


def is_waiting_for(turn: Turn, thread: threading.Thread, order: list[str]) -> None:
    """Start a thread that notes its name once it has the turn; return when it is in the line."""

    def work() -> None:
        place = turn.enter()
        entered.set()
        place.wait()
        order.append(thread.name)
        place.leave()

    entered = threading.Event()
    thread.run = work  # type: ignore[method-assign]
    thread.start()
    assert entered.wait(10)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_who_asked_first_has_the_turn_first() -> None:
    turn, order = Turn(), []
    threads = [threading.Thread(name=str(number)) for number in range(5)]
    with turn:
        for thread in threads:
            is_waiting_for(turn, thread, order)
        assert not turn.try_acquire()
    for thread in threads:
        thread.join(10)
    assert order == [thread.name for thread in threads]
    assert turn.try_acquire()


def test_a_place_that_is_given_up_lets_the_next_one_go() -> None:
    turn, order = Turn(), []
    turn.acquire()
    given_up, forgotten = turn.enter(), turn.enter()
    next_one = threading.Thread(name="next")
    is_waiting_for(turn, next_one, order)
    given_up.leave()
    given_up.leave()
    del forgotten
    turn.release()
    next_one.join(10)
    assert order == ["next"]
    had = turn.enter()
    had.wait()
    assert not turn.try_acquire()
    del had
    assert turn.try_acquire()


def test_python_goes_on_while_a_thread_waits() -> None:
    turn = Turn()
    turn.acquire()
    done = threading.Event()
    thread = threading.Thread(target=lambda: (turn.acquire(), done.set(), turn.release()))
    thread.start()
    assert not done.wait(0.05)  # returned: the waiting thread does not have the interpreter
    turn.release()
    assert done.wait(10)
    thread.join(10)


def test_an_interrupt_ends_a_wait_and_its_handler_may_ask_for_the_turn() -> None:
    turn, go_on = Turn(), threading.Event()
    order: list[str] = []

    def holder() -> None:
        with turn:
            has_it.set()
            assert go_on.wait(20)

    def handler(*_: object) -> None:
        order.append("handler")
        go_on.set()
        with turn:  # its own thread's place in the line is before it
            order.append("handler has it")
        raise KeyboardInterrupt

    has_it = threading.Event()
    thread = threading.Thread(target=holder)
    thread.start()
    assert has_it.wait(10)
    before = signal.signal(signal.SIGUSR1, handler)
    killer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1))
    try:
        killer.start()
        with pytest.raises(KeyboardInterrupt):
            turn.acquire()
    finally:
        signal.signal(signal.SIGUSR1, before)
        killer.join(10)
    thread.join(10)
    assert order == ["handler", "handler has it"]
    assert turn.try_acquire()


def test_threads_exclude_each_other() -> None:
    turn, seen = Turn(), [0]

    def work() -> None:
        for number in range(300):
            if number % 3:
                with turn:
                    change()
            else:
                until(turn.try_acquire)
                change()
                turn.release()

    def change() -> None:
        before = seen[0]
        time.sleep(0)
        seen[0] = before + 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert seen == [1200]
