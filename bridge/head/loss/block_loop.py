"""Loop over the rows of a head: block after block, the chunks of a block in parallel.

Rows that are held, or that lie on a rank, are one block; streamed rows are many blocks, and the next is processed while
the last is waited for. The forward pass adds every chunk to sums; the pass of the step overwrites it by the gradient of
its rows.

Legend: B samples, D width, N rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from threading import Lock
from typing import Protocol, TypeVar

from torch import Tensor

from geartrain.ams.programs.hosted import chunk_bounds
from geartrain.bridge.head.loss.chunk_pass import ChunkPass
from geartrain.bridge.head.loss.chunk_pool import CHUNKS
from geartrain.bridge.head.loss.kept_logits import KeptLogits
from geartrain.bridge.head.loss.softmax import OnlineSoftmax
from geartrain.bridge.placements.workspace import Arithmetic, Scratch, Workspace


class BlockOfRows(Protocol):
    """Rows of the active classes at positions ``start`` … ``stop`` − 1, in memory together."""

    @property
    def start(self) -> int:
        """Position of the first row."""

    @property
    def stop(self) -> int:
        """Position behind the last row."""

    def load(self, work: Workspace, start: int, stop: int) -> Tensor:
        """Return rows [N, D] at these positions, in the compute dtype on the features' device."""


R = TypeVar("R")
AnyBlock = TypeVar("AnyBlock", bound=BlockOfRows)

Overwrite = Callable[[Workspace, Tensor, int, Tensor | None], Tensor]
"""Function that overwrites rows [N, D] from a position on by their gradient, with their kept logits if there are any;
returns a sum that is finite only if all of it is."""


def add_rows(
    softmax: OnlineSoftmax, chunk_pass: ChunkPass, blocks: Iterable[BlockOfRows], kept: KeptLogits | None = None
) -> None:
    """Add all rows to the sums; each of P sums takes every P-th chunk of a block, whatever the number of threads."""
    arithmetic, sums = softmax.batch.arithmetic, softmax.parts
    turns = [Lock() for _ in sums]

    def add_part(scratch: Scratch, block: BlockOfRows, part: int) -> None:
        work = Workspace(arithmetic, scratch)
        with turns[part]:  # a part of the next block may start while this block's runs; it waits here
            for low, high in chunk_bounds(block.stop - block.start, chunk_pass.chunk_rows)[part :: len(sums)]:
                start, stop = block.start + low, block.start + high
                rows_ND = block.load(work, start, stop)
                chunk_pass.forward(work, sums[part], rows_ND, start, kept.chunk(start, stop) if kept else None)

    spreads = chunk_pass.spreads_operations
    for _ in CHUNKS.over_blocks(
        blocks, lambda _: range(len(sums)), add_part, arithmetic.device, spreads_operations=spreads
    ):
        pass


def gradient_blocks(
    overwrite: Overwrite,
    chunk_pass: ChunkPass,
    arithmetic: Arithmetic,
    blocks: Iterable[AnyBlock],
    use: Callable[[AnyBlock, int, int, Tensor, Tensor], R],
    kept: KeptLogits | None = None,
) -> Generator[tuple[AnyBlock, list[R]]]:
    """Yield (block, results of ``use(block, start, stop, gradient_ND, checksum)`` for its chunks), block by block.

    The gradients are scratch, or the block itself where that is of the compute dtype.
    """

    def compute(scratch: Scratch, block: AnyBlock, chunk: tuple[int, int]) -> R:
        work = Workspace(arithmetic, scratch)
        start, stop = block.start + chunk[0], block.start + chunk[1]
        rows_ND = block.load(work, start, stop)
        checksum = overwrite(work, rows_ND, start, kept.chunk(start, stop) if kept else None)
        return use(block, start, stop, rows_ND, checksum)

    def chunks(block: AnyBlock) -> list[tuple[int, int]]:
        return chunk_bounds(block.stop - block.start, chunk_pass.chunk_rows)

    spreads = chunk_pass.spreads_operations
    return CHUNKS.over_blocks(blocks, chunks, compute, arithmetic.device, spreads_operations=spreads)
