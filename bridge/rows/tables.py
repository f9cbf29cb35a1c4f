"""What a head needs of a table, and numpy views of tensors so that rows reach it without a copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from geartrain.ams.client.hosted_calls import InputsOfShard
from geartrain.ams.values.optimizers.registry import RowOptimizerSpec
from geartrain.ams.values.scheduler_messages import ClusterView
from geartrain.ams.values.shard_messages import Arrays, Done, SyncGroup
from geartrain.ams.values.specs import DTYPES, DTypeName, Ids, Initializer, TableSpec

TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class HeadWrite(Protocol):
    """A prepared push. Sent again after an error it reaches only the shards that have not answered."""

    def send(self) -> Done:
        """Send it to the shards that have not answered."""

    def abandon(self) -> None:
        """Give it up."""


class TableWrite(HeadWrite, Protocol):
    """A prepared push of rows. Several can be sent together."""

    @property
    def is_sent(self) -> bool:
        """Whether all shards have answered."""

    def announce(self) -> None:
        """Let those who keep rows know that these change from now on."""

    def send_with(self, others: Sequence[Any]) -> None:
        """Send it, and other pushes of rows, in one request to each shard. Raises the first error of all."""


class ReadableTable(Protocol):
    """Rows that can be read and overwritten. Ids are distinct int64; arrays are C-contiguous."""

    @property
    def spec(self) -> TableSpec:
        """What the table is."""

    def pull_into(self, ids: Ids, out: npt.NDArray[Any], *, required_sync: SyncGroup | None = None) -> None:
        """Write the rows of ``ids`` to ``out`` [N, D]."""

    def pull_into_async(
        self, ids: Ids, out: npt.NDArray[Any], *, required_sync: SyncGroup | None = None
    ) -> Future[None]:
        """Begin :meth:`pull_into`."""

    def assign(self, ids: Ids, rows: npt.NDArray[Any]) -> Done:
        """Overwrite rows."""


class HeadCalls(Protocol):
    """The part of ``geartrain.ams.client.hosted_calls.HostedCalls`` that heads use."""

    @property
    def part_bytes(self) -> int:
        """What the inputs of one call, and its answer, should not exceed."""

    @property
    def view(self) -> ClusterView:
        """The shards, and which buckets are whose."""

    def compute(self, operation: str, inputs: InputsOfShard, *, required_sync: SyncGroup | None = None) -> list[Arrays]:
        """What the model makes of the inputs on each shard."""

    def prepare_update(
        self,
        inputs: InputsOfShard,
        *,
        lr: float | None = None,
        scale: float = 1.0,
        optimizer_scalars: Mapping[str, float] = ...,
        group: SyncGroup | None = None,
    ) -> HeadWrite:
        """Number an update; nothing travels yet."""


class HeadTable(ReadableTable, Protocol):
    """The part of ``geartrain.ams.client.table.Table`` that heads use."""

    def prepare_push(
        self,
        ids: Ids,
        gradients: npt.NDArray[Any],
        *,
        lr: float | None = None,
        scale: float = 1.0,
        optimizer_scalars: Mapping[str, float] = ...,
        group: SyncGroup | None = None,
        step_goes_on: bool = False,
        known_finite: bool = False,
        known_distinct: bool = False,
    ) -> TableWrite:
        """Check and number a push of ``scale`` · ``gradients`` [N, D]; nothing travels yet.

        ``lr`` and ``optimizer_scalars`` replace numbers of the table's optimizer.
        ``step_goes_on``: more pushes of the same step follow. ``known_finite``: none need be looked for.
        ``known_distinct``: no id occurs twice.
        """

    def with_wire(self, wire_dtype: DTypeName | None) -> Self:
        """The same table, whose rows travel so."""

    def hosted(self, model: str) -> HeadCalls:
        """The way to a hosted model beside the rows."""


class HeadCluster(Protocol):
    """The part of a cluster that heads use."""

    def create_table(
        self,
        name: str,
        *,
        dim: int,
        optimizer: RowOptimizerSpec,
        num_rows: int | None = None,
        initializer: Initializer = ...,
        seed: int = 0,
        dtype: Any = "float32",
        slot_dtype: Any = "float32",
        reuse: bool = False,
    ) -> HeadTable:
        """Make a table, or open an equal one with ``reuse``."""


def as_numpy(tensor: Tensor) -> npt.NDArray[Any]:
    """The same memory as a numpy array; the tensor lies on the host. bfloat16 becomes that of ml_dtypes."""
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(DTYPES["bfloat16"])
    return np.asarray(tensor.numpy())


def gradient_view(rows: Tensor) -> Tensor:
    """The memory of pulled rows in the type their gradient is kept in: 16-bit rows have bfloat16 gradients.

    float16 would lose the small gradients of the negatives; bfloat16 has the range of float32.
    """
    return rows.view(torch.bfloat16) if rows.dtype == torch.float16 else rows
