"""Stream of many classes' rows, block by block: the next block is pulled while the last is processed."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from geartrain.ams.programs.hosted import chunk_bounds
from geartrain.ams.programs.selection import ActiveClasses
from geartrain.ams.values.shard_messages import SyncGroup
from geartrain.ams.values.specs import Ids
from geartrain.bridge.placements.workspace import Buffer, BufferPool, Workspace
from geartrain.bridge.rows.tables import TORCH_DTYPES, ReadableTable, as_numpy
from geartrain.bridge.rows.transfers import DeviceEvent

BLOCK_BYTES = 8 << 20
"""Bytes of one pulled block."""

NUM_BUFFERS = 4
"""Blocks held at a time: one being pulled, one waiting, one being processed, one being pushed."""


@dataclass(frozen=True)
class Block:
    """Rows of the active classes at positions ``start`` … ``stop`` − 1."""

    start: int
    stop: int
    ids: Ids
    rows_ND: Tensor
    """Private host copy in the table's dtype; in a stream valid until the next two blocks have been requested."""

    def load(self, work: Workspace, start: int, stop: int) -> Tensor:
        """Load rows as :class:`~geartrain.bridge.head.loss.block_loop.BlockOfRows`."""
        return work.load_rows(self.rows_ND[start - self.start : stop - self.start])


def block_rows_for(row_bytes: int) -> int:
    """Return the rows of one block."""
    return max(1024, BLOCK_BYTES // row_bytes)


class RowStream:
    """Pulls the active classes from ``first`` on, block by block: one request per block and shard."""

    def __init__(
        self,
        table: ReadableTable,
        active: ActiveClasses,
        pool: BufferPool,
        device: torch.device,
        required_sync: SyncGroup | None = None,
    ) -> None:
        self._table = table
        self._active = active
        self._pool = pool
        self._device = device
        self._required_sync = required_sync
        self._buffers: list[Buffer] = []
        self._last_uses: list[DeviceEvent] = []
        """Moments at which the device has read and written each buffer."""
        self._block_rows = min(block_rows_for(table.spec.row_bytes), active.num)

    def blocks(self, first: int = 0) -> Iterator[Block]:
        """Yield blocks from position ``first`` on. Each request ends the use of the last block but two, except for
        operations queued on a device."""
        num_bytes = self._block_rows * self._table.spec.row_bytes
        host = torch.device("cpu")
        self._buffers = [
            self._pool.acquire(num_bytes, host, pinned=self._device.type == "cuda") for _ in range(NUM_BUFFERS)
        ]
        self._last_uses = [DeviceEvent(host)] * NUM_BUFFERS
        ahead = self._start(self._buffers[0], first)
        turn = 0
        while ahead is not None:
            block, pull = ahead
            pull.result()
            own, turn = turn, (turn + 1) % NUM_BUFFERS
            self._last_uses[turn].wait()
            ahead = self._start(self._buffers[turn], block.stop)
            yield block
            self._last_uses[own] = DeviceEvent(self._device)

    def bounds(self) -> list[tuple[int, int]]:
        """Return start and stop of all blocks."""
        return chunk_bounds(self._active.num, self._block_rows)

    def close(self) -> None:
        """Release the memory. Not after an error: an unfinished pull or push may still use it."""
        for buffer, last_use in zip(self._buffers, self._last_uses, strict=True):
            self._pool.release(buffer, last_use)
        self._buffers = []

    def _start(self, buffer: Buffer, start: int) -> tuple[Block, Future[None]] | None:
        if start >= self._active.num:
            return None
        stop = min(start + self._block_rows, self._active.num)
        spec = self._table.spec
        rows_ND = buffer.tensor((stop - start, spec.dim), TORCH_DTYPES[spec.dtype])
        ids = self._active.range(start, stop)
        pull = self._table.pull_into_async(ids, as_numpy(rows_ND), required_sync=self._required_sync)
        return Block(start, stop, ids, rows_ND), pull
