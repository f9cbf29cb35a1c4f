"""The threads that work on chunks, where they are not there or already busy with us."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch

from geartrain.bridge.head.loss.chunk_pool import CHUNKS

CPU = torch.device("cpu")


def _apart_in_child() -> None:
    if CHUNKS.apart(lambda: 7, CPU) != 7:
        raise SystemExit(3)


def _apart_within_apart() -> None:
    torch.set_num_threads(1)
    if CHUNKS.apart(lambda: CHUNKS.apart(lambda: 7, CPU), CPU) != 7:
        raise SystemExit(3)


def _end_the_session_of_the_parent() -> None:
    PARENTS.close()
    with CHUNKS.session(CPU) as session:
        session.start(lambda _, item: item, [1, 2]).wait()
    if (CHUNKS.num_threads, torch.get_num_threads()) != (2, 2):
        raise SystemExit(3)


PARENTS = ExitStack()


@pytest.mark.parametrize("work", [_apart_in_child, _apart_within_apart])
def test_work_ends_in_a_forked_child_and_on_a_thread_of_the_pool(work: Callable[[], None]) -> None:
    assert CHUNKS.apart(lambda: 7, CPU) == 7
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    try:
        child.join(60)
        assert child.exitcode == 0
    finally:
        child.kill()
        child.join()


def test_a_child_that_is_forked_in_a_session_can_end_it() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    PARENTS.enter_context(CHUNKS.session(CPU))
    child = multiprocessing.get_context("fork").Process(target=_end_the_session_of_the_parent)
    try:
        child.start()
        child.join(60)
        assert child.exitcode == 0
    finally:
        PARENTS.close()
        torch.set_num_threads(threads)
        child.kill()
        child.join()


def test_of_overlapping_sessions_none_leaves_a_thread_lowered() -> None:
    begins, ends = threading.Barrier(2), threading.Event()

    def other() -> tuple[int, int]:
        with CHUNKS.session(CPU):
            begins.wait(60)
            assert ends.wait(60)
            inside = CHUNKS.num_threads
        return inside, torch.get_num_threads()

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with ThreadPoolExecutor(1) as executor:
            with CHUNKS.session(CPU):
                later = executor.submit(other)
                begins.wait(60)
            first = torch.get_num_threads()
            ends.set()
            assert (first, later.result()) == (2, (2, 2))
    finally:
        ends.set()
        torch.set_num_threads(threads)
