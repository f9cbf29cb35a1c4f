"""One push of a dense table on its way."""

from __future__ import annotations

from dataclasses import dataclass

from geartrain.ams.client.writes import RowWrite, Write


@dataclass
class Update:
    """One push under way: sent again after an error, it reaches only the shards that have not answered."""

    sequence: int | None
    buffers: Write | None
    weights: RowWrite
    is_refused: bool = False
    """A shard refused it, as it would a repeat."""
    is_dropped: bool = False
    """Its gradients were dropped, but some shards have applied it."""
    is_begun: bool = False
    """It was sent before, and has gradients of its own since."""

    @property
    def is_on_a_shard(self) -> bool:
        return self.weights.is_on_a_shard or (self.buffers is not None and self.buffers.is_on_a_shard)

    def abandon(self) -> None:
        for write in (self.buffers, self.weights):
            if write is not None:
                write.abandon()

    def keep(self) -> None:
        """Let the gradients be changed: what was not sent is the same when it is sent again."""
        self.weights.keep_rows()
        self.is_begun = True
