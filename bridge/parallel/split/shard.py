"""Placement of a layer's rows on ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from geartrain.bridge.parallel.mesh import MeshGroup


@dataclass(frozen=True, eq=False)
class RowShard:
    """Rows [first, stop) of ``num``, on one of the ranks of ``group``; the last ranks may have fewer, or none.

    The division is that of DTensor's ``Shard(0)``.
    """

    num: int
    group: MeshGroup

    def bounds(self, rank: int) -> tuple[int, int]:
        """Return (first, stop) of ``rank``."""
        each = -(-self.num // self.group.link.world_size)
        return min(rank * each, self.num), min((rank + 1) * each, self.num)

    @property
    def first(self) -> int:
        """First row of this rank."""
        return self.bounds(self.group.link.rank)[0]

    @property
    def stop(self) -> int:
        """End of this rank's rows, exclusive."""
        return self.bounds(self.group.link.rank)[1]

    @property
    def num_local(self) -> int:
        """Number of rows of this rank."""
        return self.stop - self.first

    @property
    def rows(self) -> range:
        """Rows of this rank."""
        return range(self.first, self.stop)

    @property
    def sizes(self) -> list[int]:
        """Number of rows of each rank."""
        bounds = [self.bounds(rank) for rank in range(self.group.link.world_size)]
        return [stop - first for first, stop in bounds]

    def as_dtensor(self, local: Tensor) -> Tensor:
        """Return the tensor [num, …] of which this rank holds ``local`` [num_local, …], in the same memory."""
        if self.group.link.world_size == 1:
            return local
        from torch.distributed.tensor import DTensor, Shard

        sharded: Tensor = DTensor.from_local(
            local,
            self.group.device_mesh,
            [Shard(0)],
            run_check=False,
            shape=torch.Size((self.num, *local.shape[1:])),
            stride=local.stride(),
        )
        return sharded


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a parameter; its gradient becomes a DTensor if the parameter is one."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
