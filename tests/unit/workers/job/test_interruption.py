"""A signal as a wish to stop, in this process; of real workers it is tests/faults/test_sigterm_of_workers.py."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from geartrain.workers.job import interruption as module
from geartrain.workers.job.interruption import Stopped, interruption


def wait_until_heard() -> None:
    time.sleep(0)  # Python runs handlers between two instructions of this thread


def test_what_torchrun_passes_on_of_a_terminals_signal_is_no_second_one() -> None:
    with interruption() as stop, stop.in_order():
        for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
            wait_until_heard()
        assert stop()


def test_a_second_signal_later_stops_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ONE_WISH_SECONDS", 0.0)
    with pytest.raises(KeyboardInterrupt), interruption() as stop, stop.in_order():
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            wait_until_heard()
        pytest.fail("nothing was raised")


def test_where_nothing_is_to_be_saved_it_is_raised_also_if_it_came_before() -> None:
    with interruption() as stop, stop.in_order():
        os.kill(os.getpid(), signal.SIGINT)
        wait_until_heard()
        with pytest.raises(Stopped), stop.at_once("tested the model"):
            pytest.fail("the block was entered")
        assert stop.why.startswith("Stopped while it tested the model: nothing is saved yet")
        assert stop.exit_code == module.NOTHING_SAVED
        stop.saved = lambda: "saved is step 5."
        assert stop.exit_code == module.STOPPED


def test_one_within_another_is_the_same_and_nothing_of_it_stays() -> None:
    handler, threads = signal.getsignal(signal.SIGTERM), threading.active_count()
    with interruption() as outer, interruption() as inner:
        assert inner is outer
        assert signal.getsignal(signal.SIGTERM) is not handler
    assert signal.getsignal(signal.SIGTERM) is handler
    assert threading.active_count() == threads
