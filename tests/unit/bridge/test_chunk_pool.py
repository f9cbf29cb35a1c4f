"""The threads that work on chunks, where they are not there or already busy with us."""

from __future__ import annotations

import multiprocessing

import torch

from geartrain.bridge.heads.chunk_pool import CHUNKS

CPU = torch.device("cpu")


def _answer_in_child() -> None:
    if CHUNKS.apart(lambda: 7, CPU) != 7:
        raise SystemExit(3)


def test_a_forked_child_has_threads_of_its_own() -> None:
    assert CHUNKS.apart(lambda: 7, CPU) == 7
    child = multiprocessing.get_context("fork").Process(target=_answer_in_child)
    child.start()
    try:
        child.join(60)
        assert child.exitcode == 0
    finally:
        child.kill()
        child.join()


def test_work_apart_on_a_thread_of_the_pool_is_done_there() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert CHUNKS.apart(lambda: CHUNKS.apart(lambda: 7, CPU), CPU) == 7
    finally:
        torch.set_num_threads(threads)
