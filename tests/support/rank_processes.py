"""Ranks as processes of this machine, over gloo. They are forked from a server that has imported everything once."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.support.forkserver import FORKSERVER


def run_ranks(function: Callable[..., None], ranks: int, folder: Path, *arguments: Any) -> None:
    """Call ``function(*arguments)`` on each rank of a new process group; raise what one raises.

    Before them it is given what it names of ``rank``, ``ranks`` and ``folder``.
    """
    meeting = folder / f"meeting-{function.__name__}-{ranks}-{len(list(folder.iterdir()))}"
    mp.start_processes(
        _run,
        args=(ranks, str(meeting), function, folder, arguments),
        nprocs=ranks,
        start_method=FORKSERVER.get_start_method(),
    )


def on_ranks(*counts: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of what each rank does, by so many ranks: :func:`run_ranks` of the function below, in a folder."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @pytest.mark.parametrize("ranks", counts)
        def test(ranks: int, tmp_path: Path) -> None:
            run_ranks(_call_tested, ranks, tmp_path, function.__module__, function.__name__)

        for name in ("__module__", "__name__", "__qualname__", "__doc__"):
            setattr(test, name, getattr(function, name))
        test.on_a_rank = function  # type: ignore[attr-defined]
        return test

    return decorate


def _call_tested(rank: int, ranks: int, folder: Path, module: str, name: str) -> None:
    _call(getattr(importlib.import_module(module), name).on_a_rank, rank, ranks, folder)


def _call(function: Callable[..., None], rank: int, ranks: int, folder: Path, *arguments: Any) -> None:
    named = {"rank": rank, "ranks": ranks, "folder": folder}
    function(*(named[name] for name in inspect.signature(function).parameters if name in named), *arguments)


def _run(
    rank: int, ranks: int, meeting: str, function: Callable[..., None], folder: Path, arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    dist.barrier()  # gloo fails where a rank leaves while another is still connecting to it
    try:
        _call(function, rank, ranks, folder, *arguments)
    finally:
        dist.destroy_process_group()
