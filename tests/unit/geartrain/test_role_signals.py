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
    stop_reason = None
    def wait(self):
        threading.Event().wait()
    def stop(self, grace_seconds):
        print("stopping", flush=True)
        threading.Event().wait({seconds})

role.serve("test", Stubborn())
"""


@pytest.mark.parametrize(
    ("signals", "seconds", "code"),
    [
        ([signal.SIGTERM] * 2, None, 1),
        ([signal.SIGINT] * 2, None, 1),
        ([signal.SIGINT, signal.SIGTERM], 0.2, 0),  # a terminal and a parent that both tell it mean one end
    ],
)
def test_the_same_signal_again_ends_a_role_that_is_still_stopping(
    signals: list[signal.Signals], seconds: float | None, code: int
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _ROLE.format(seconds=seconds)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert '"ready"' in process.stdout.readline()
        process.send_signal(signals[0])
        assert process.stdout.readline() == "stopping\n"
        process.send_signal(signals[1])
        assert process.wait(20) == code


_ELSEWHERE = """
import signal, sys, threading, time
from geartrain.launch import role

def is_waiting(thread):
    frame = sys._current_frames()[thread.ident]
    return frame.f_code.co_name == "wait" and frame.f_code.co_filename == threading.__file__

class Quiet:
    stop_reason = None
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
