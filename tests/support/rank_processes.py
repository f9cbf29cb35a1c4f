"""Ranks as processes of this machine, over gloo. They are forked from a server that has imported everything once."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PRELOAD = [
    "torch._dynamo",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "geartrain.ams.client.factory",
    "geartrain.bridge.head.class_head",
    "geartrain.bridge.parallel.parallelize",
    "geartrain.bridge.rows.optimizer",
]


def run_ranks(function: Callable[..., None], ranks: int, folder: Path, *arguments: Any) -> None:
    """Call ``function(rank, ranks, folder, *arguments)`` on each rank of a new process group; raise what one raises."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    meeting = folder / f"meeting-{function.__name__}-{ranks}-{len(list(folder.iterdir()))}"
    mp.start_processes(
        _run,
        args=(ranks, str(meeting), function, folder, arguments),
        nprocs=ranks,
        start_method="forkserver",
    )


def _run(
    rank: int, ranks: int, meeting: str, function: Callable[..., None], folder: Path, arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    dist.barrier()  # gloo fails where a rank leaves while another is still connecting to it
    try:
        function(rank, ranks, folder, *arguments)
    finally:
        dist.destroy_process_group()
