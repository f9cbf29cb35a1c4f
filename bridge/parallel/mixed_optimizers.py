"""Support for torch's optimizers over parameters of which some are sharded over the ranks, and some whole on each.

With ``foreach``, the default on CUDA, and ``fused`` an optimizer works on lists of parameters, and PyTorch refuses
lists of both DTensors and plain tensors. As optimizers work elementwise, a plain tensor may stand for a replicated one:
PyTorch calls it implicit replication.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

_steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, contextlib.ExitStack] = weakref.WeakKeyDictionary()
"""Optimizers in a step over both kinds."""
_is_ready = False


def allow_mixed_optimizers() -> None:
    """Let every optimizer of this process step over both kinds from now on."""
    global _is_ready
    if not _is_ready:
        register_optimizer_step_pre_hook(_start_step)
        register_optimizer_step_post_hook(_finish_step)
        _is_ready = True


def _start_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.experimental import implicit_replication

    _finish_step(optimizer)  # left from a step that raised
    if any(
        len({isinstance(parameter, DTensor) for parameter in group["params"]}) > 1 for group in optimizer.param_groups
    ):
        _steps[optimizer] = contextlib.ExitStack()
        _steps[optimizer].enter_context(implicit_replication())


def _finish_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    stack = _steps.pop(optimizer, None)
    if stack is not None:
        stack.close()
