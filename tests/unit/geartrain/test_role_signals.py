"""How a role meets signals: the first ends it in good order, the same again at once."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

_ROLE = """
import threading
from geartrain.launch import role

class Stubborn:
    end_reason = None
    def wait(self):
        threading.Event().wait()
    def stop(self, grace_seconds):
        print("stopping", flush=True)
        threading.Event().wait({seconds})

role.serve("test", Stubborn())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_same_signal_again_ends_a_role_that_is_still_stopping(number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _ROLE.format(seconds=None)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert '"ready"' in process.stdout.readline()
        process.send_signal(number)
        assert process.stdout.readline() == "stopping\n"
        process.send_signal(number)
        assert process.wait(20) == 1


def test_a_terminal_and_a_parent_that_both_tell_it_mean_one_end() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _ROLE.format(seconds=0.2)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert '"ready"' in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "stopping\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


_ELSEWHERE = """
import signal, sys, threading, time
from geartrain.launch import role

def is_waiting(thread):
    frame = sys._current_frames()[thread.ident]
    return frame.f_code.co_name == "wait" and frame.f_code.co_filename == threading.__file__

class Quiet:
    end_reason = None
    def wait(self):  # on a thread of its own, which takes the signal in place of the main thread
        while not is_waiting(threading.main_thread()):
            time.sleep(0.01)
        time.sleep(0.5)  # from its frame it goes to sleep
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        threading.Event().wait()
    def stop(self, grace_seconds):
        pass

role.serve("test", Quiet())
"""


def test_a_signal_that_another_thread_is_given_ends_a_role_too() -> None:
    with subprocess.Popen([sys.executable, "-c", _ELSEWHERE], stdout=subprocess.DEVNULL) as process:
        try:
            assert process.wait(20) == 0
        finally:
            process.kill()
