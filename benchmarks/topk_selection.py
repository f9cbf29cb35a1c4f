"""Selecting the largest 0.1 % of every gradient: the paper's four methods, and compiled code, against a loop.

Gradients of ResNet-50 (161 tensors, 25.6 million elements) and of a transformer (12 layers of 768 and 3072, 30,000
words: 197 tensors, 109 million). CPU seconds of one thread, so that a busy machine moves the figures little; a loop of
``torch.topk`` uses one thread in any case. Every call gets other gradients, as a step does.

The second half is a whole step of deep gradient compression: momentum, accumulation, a look for NaN, selection,
masking; against the same in tensor operations, and against the time in which this machine copies as many bytes.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from _common import median_seconds, result, threads
from _topk_rivals import select_by_sampling, select_divided
from torch import Tensor

from geartrain.ams.kernels.gradients import take_largest
from geartrain.bridge.parallel.topk.compaction import CompiledCompaction, TensorCompaction
from geartrain.bridge.parallel.topk.grouping import GroupedTopK
from geartrain.bridge.parallel.topk.selection import counts
from geartrain.launch.bench import Result

SPARSITY, MOMENTUM = 0.999, 0.9
BYTES_READ_AND_WRITTEN = 20
"""Of an element in a compiled step: g, u, v read, u, v written."""
SHIFTS = 4096
LOOP = "a loop of torch.topk"

Tensors = list[Tensor]


def resnet50() -> list[int]:
    """Elements of the 161 parameters."""
    numels = [64 * 3 * 49, 64, 64]
    inputs = 64
    for width, blocks in zip((64, 128, 256, 512), (3, 4, 6, 3), strict=True):
        for block in range(blocks):
            convolutions = [(inputs * width, width), (width * width * 9, width), (width * width * 4, width * 4)]
            if block == 0:
                convolutions.append((inputs * width * 4, width * 4))
            numels += [numel for weight, channels in convolutions for numel in (weight, channels, channels)]
            inputs = width * 4
    return [*numels, 2048 * 1000, 1000]


def transformer(layers: int = 12, dim: int = 768, hidden: int = 3072, words: int = 30_000) -> list[int]:
    """Elements of the parameters: embeddings of words and 512 positions, attention, two linear layers, norms."""
    layer = [dim * dim, dim] * 4 + [dim * hidden, hidden, hidden * dim, dim] + [dim] * 4
    return [words * dim, 512 * dim, dim, dim, *layer * layers, dim]


class Gradients:
    """Gradients of normally distributed elements: windows of one pool, each time somewhere else."""

    def __init__(self, numels: Sequence[int]) -> None:
        self._numels = numels
        self._pool = torch.randn(sum(numels) + SHIFTS, generator=torch.Generator().manual_seed(0))
        self._random = np.random.default_rng(0)

    def __call__(self) -> Tensors:
        start = int(self._random.integers(SHIFTS))
        return list(self._pool[start : start + sum(self._numels)].split(list(self._numels)))


def results(full: bool = False) -> Iterator[Result]:  # noqa: ARG001
    """Yield the cases of ``geartrain bench topk_selection``."""
    with threads(1):
        for name, numels in (("ResNet-50", resnet50()), ("transformer", transformer())):
            ks = counts(numels, SPARSITY)
            yield from _selections(name, numels, ks)
            yield from _steps(name, numels, ks)


def _selections(name: str, numels: list[int], ks: list[int]) -> Iterator[Result]:
    estimates = np.zeros(len(numels), np.float32)
    grouping = GroupedTopK(numels, ks, torch.device("cpu"))
    buffer = torch.zeros(grouping.buffer_numel)

    def grouped(gradients: Tensors) -> None:
        torch._foreach_copy_(grouping.views(buffer), gradients)
        buffer[grouping.select(buffer)[1]]

    def compiled(gradients: Tensors) -> None:
        take_largest([gradient.numpy() for gradient in gradients], ks, estimates)

    sides = {
        "sampling": functools.partial(select_by_sampling, ks=ks),
        "divide and conquer": functools.partial(select_divided, ks=ks),
        "grouped": grouped,
        "compiled, all tensors in one call": compiled,
    }
    loop, *ours = _timed([functools.partial(_loop, ks=ks), *sides.values()], Gradients(numels))
    for method, seconds in zip(sides, ours, strict=True):
        case = f"{name}, {len(numels)} tensors, the largest 0.1 % of each, 1 thread: {method}"
        target = 4.0 if method.startswith("compiled") else None
        yield result(case, seconds * 1e3, LOOP, loop * 1e3, "CPU ms", target=target)


def _steps(name: str, numels: list[int], ks: list[int]) -> Iterator[Result]:
    gradients = Gradients(numels)
    velocities, residuals = ([torch.zeros(numel) for numel in numels] for _ in range(2))
    ways = (CompiledCompaction(numels, ks), TensorCompaction(numels, ks, torch.device("cpu")))

    def step(way: CompiledCompaction | TensorCompaction, drawn: Tensors) -> None:
        do = way.start if isinstance(way, TensorCompaction) else way.compact
        do(drawn, velocities, residuals, momentum=MOMENTUM)

    def loop(drawn: Tensors) -> None:
        for gradient, velocity, residual, k in zip(drawn, velocities, residuals, ks, strict=True):
            residual.add_(velocity.mul_(MOMENTUM).add_(gradient))
            indices = residual.abs().topk(k, sorted=False).indices
            residual[indices]
            residual[indices] = velocity[indices] = 0

    # g, u, v stand in for any memory of that size: a copy reads and writes 4 bytes of each element.
    def copied(drawn: Tensors) -> None:
        for gradient, velocity in zip(drawn, velocities, strict=True):
            velocity.copy_(gradient)

    sides = [functools.partial(step, way) for way in ways]
    ours, tensors, looped = _timed([*sides, loop], gradients)
    bound = _timed([copied], gradients)[0] * BYTES_READ_AND_WRITTEN / 8
    case = f"{name}, a step of momentum, accumulation, selection, masking, 1 thread"
    rivals = {"a loop of torch operations, without a look for NaN": looped, "grouped tensor operations": tensors}
    for rival, seconds in rivals.items():
        yield result(case, ours * 1e3, rival, seconds * 1e3, "CPU ms", target=None)
    moved = f"copying {BYTES_READ_AND_WRITTEN} bytes an element"
    yield result(case, ours * 1e3, moved, bound * 1e3, "CPU ms", target=None)


def _loop(gradients: Tensors, ks: Sequence[int]) -> None:
    for gradient, k in zip(gradients, ks, strict=True):
        gradient[gradient.abs().topk(k, sorted=False).indices]


def _timed(sides: Sequence[Callable[[Tensors], object]], gradients: Callable[[], Tensors]) -> list[float]:
    return median_seconds(sides, gradients, rounds=2, calls=3, uncounted=1, clock=time.process_time)
