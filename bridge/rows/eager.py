"""Exclusion of functions from torch.compile: compiled kernels, threads, requests to shards."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def runs_eagerly(function: Callable[P, R]) -> Callable[P, R]:
    """Break the graph before ``function``, and trace nothing that it calls.

    Like ``torch.compiler.disable``, whose import loads the compiler, for about a second; importing this costs nothing.
    """
    disabled: list[Callable[P, R]] = []

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)  # nothing can have been compiled
        if not disabled:
            disabled.append(torch.compiler.disable(function))  # type: ignore[no-untyped-call]
        return disabled[0](*args, **kwargs)

    return call
