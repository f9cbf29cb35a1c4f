"""Rank 0 of several over NCCL, with nobody else there: collectives are counted and move nothing."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten

from tests.recorder.report import Report, our_line

_COLLECTIVES = [
    "all_reduce",
    "all_to_all_single",
    "all_to_all",
    "broadcast",
    "send",
    "recv",
    "isend",
    "irecv",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "reduce",
    "barrier",
    "batch_isend_irecv",
]


class _Done:
    def wait(self, *args: Any) -> bool:  # noqa: ARG002
        return True

    def is_completed(self) -> bool:
        return True


@contextlib.contextmanager
def dry_ranks(world_size: int, report: Report) -> Iterator[None]:
    """Inside, torch.distributed says that this is rank 0 of ``world_size``; what others would say is what it says."""
    if world_size == 1:
        yield
        return

    def collective(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = [item for item in tree_flatten((args, kwargs))[0] if isinstance(item, Tensor)]
            on = tensors[0].device.type if tensors else "host"
            report.collectives[f"{name} of the {'device' if on == 'cuda' else 'host'} @ {our_line(3)}"] += 1
            if name == "all_gather":
                for part in args[0]:
                    part.copy_(args[1])
            elif name.startswith("all_gather") and on == "cpu":
                args[0].view(-1).copy_(args[1].view(-1).repeat(world_size))
            elif name == "all_to_all_single" and on == "cpu" and args[0].shape == args[1].shape:
                args[0].copy_(args[1])
            return [_Done()] * len(args[0]) if name == "batch_isend_irecv" else _Done()

        return call

    group = mock.Mock(name="group")
    group._get_backend.return_value.options = None
    says: dict[str, Any] = {
        "is_initialized": lambda: True,
        "get_world_size": lambda *_: world_size,
        "get_rank": lambda *_: 0,
        "get_backend": lambda *_: "nccl",
        "new_group": lambda *_, **__: group,
        "get_process_group_ranks": lambda *_: list(range(world_size)),
        "get_global_rank": lambda _, rank: rank,
        "group": mock.Mock(WORLD=group),
        "P2POp": lambda end, tensor, *_: (end, tensor),
    }
    communicator = importlib.import_module("geartrain.bridge.collectives.communicator")
    with contextlib.ExitStack() as stack:
        for name in _COLLECTIVES:
            if hasattr(dist, name):
                stack.enter_context(mock.patch.object(dist, name, collective(name)))
        for name, answer in says.items():
            stack.enter_context(mock.patch.object(dist, name, answer))
        for name in ("all_gather_tensor", "reduce_scatter_tensor"):
            stack.enter_context(mock.patch.object(communicator, name, collective(name)))
        yield
