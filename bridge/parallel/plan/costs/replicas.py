"""What it costs that ranks have the same parameters: gradients averaged in buckets, or sharded parameters.

The rules are those of ``torch.nn.parallel.DistributedDataParallel`` and ``torch.distributed.fsdp.fully_shard``.

Legend: R ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from geartrain.bridge.parallel.plan.costs.collectives import Collective
from geartrain.bridge.parallel.plan.costs.trace import Operation
from geartrain.bridge.parallel.topk.exchange import sent_counts

FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 << 20, 25 << 20
"""DistributedDataParallel's own: its first bucket is small, so that the network begins soon."""
INDEXED_BYTES = 8
"""Of a gradient value that travels with its place: int32 and float32."""


def ready_order(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Those with gradients, in the order in which a backward pass makes them: the last layer's first."""
    return [one for one in reversed(list(parameters)) if one.requires_grad]


def shard_of(parameter: nn.Parameter, ranks: int) -> nn.Parameter:
    """The largest shard of a parameter on the meta device: a part of its first dimension."""
    whole = parameter.shape or (1,)
    local = torch.empty(-(-whole[0] // ranks), *whole[1:], dtype=parameter.dtype, device="meta")
    return nn.Parameter(local, requires_grad=parameter.requires_grad)


def buckets(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    """How gradients that come in this order are averaged together, from the second step on.

    A bucket is closed as soon as it is as large as its limit; each has one dtype.
    """
    closed: list[list[Tensor]] = []
    is_first: dict[object, bool] = {}
    filling: dict[object, list[Tensor]] = {}
    for one in parameters:
        bucket = filling.setdefault(one.dtype, [])
        bucket.append(one)
        limit = FIRST_BUCKET_BYTES if is_first.get(one.dtype, True) else BUCKET_BYTES
        if sum(tensor.nbytes for tensor in bucket) >= limit:
            closed.append(filling.pop(one.dtype))
            is_first[one.dtype] = False
    return closed + [bucket for bucket in filling.values() if bucket]


def averages(bucket: Sequence[Tensor], ranks: int, sparsity: float | None) -> list[tuple[Sequence[Tensor], Collective]]:
    """The collectives of a bucket, each with what it averages: an all-reduce, and with ``sparsity`` an all-gather.

    Of a tensor as many values travel, with their places, as :class:`TopKGradients` sends; small ones are dense.
    """
    numels = [one.numel() for one in bucket]
    sent = sent_counts(numels, sparsity, ranks) if sparsity else numels
    found: list[tuple[Sequence[Tensor], Collective]] = []
    if kept := sum(k for k, numel in zip(sent, numels, strict=True) if k < numel):
        sparse = [one for one, k in zip(bucket, sent, strict=True) if k < one.numel()]
        size = kept * INDEXED_BYTES * ranks
        of_sparse = Collective(kind="all-gather", what="largest gradients", phase="backward", bytes=size, ranks=ranks)
        found.append((sparse, of_sparse))
    dense = [one for one, k in zip(bucket, sent, strict=True) if k >= one.numel()]
    if dense:
        size = sum(one.nbytes for one in dense)
        of_dense = Collective(kind="all-reduce", what="gradients", phase="backward", bytes=size, ranks=ranks)
        found.append((dense, of_dense))
    return found


def bucket_work(bucket: Sequence[Tensor], *, is_sparse: bool) -> list[Operation]:
    """On this rank: gradients are copied into their bucket and back.

    Where they ``is_sparse`` they are added to momentum and residuals, which are read and written, and all is looked
    through.
    """
    size = sum(one.nbytes for one in bucket)
    dtype = str(bucket[0].dtype).removeprefix("torch.")
    copies = [Operation(name="bucket copy", dtype=dtype, bytes=2 * size)] * 2
    if is_sparse:
        copies.append(Operation(name="top-k", dtype=dtype, bytes=6 * size))
    return copies


def buffer_broadcasts(buffers: Iterable[Tensor], ranks: int) -> list[Collective]:
    """Buffers, such as running means, are rank 0's in each forward pass: a broadcast of each dtype's together."""
    sizes: dict[object, int] = {}
    for one in buffers:
        sizes[one.dtype] = sizes.get(one.dtype, 0) + one.nbytes
    return [
        Collective(kind="broadcast", what="buffers", phase="forward", bytes=size, ranks=ranks)
        for size in sizes.values()
        if size and ranks > 1
    ]


def sharded_collectives(parameters: Sequence[nn.Parameter], ranks: int) -> list[Collective]:
    """Of a part under ``fully_shard``: its parameters gathered before its forward pass, its gradients divided after
    its backward pass.
    """
    if ranks == 1 or not parameters:
        return []
    gathered = sum(shard_of(one, ranks).nbytes for one in parameters) * ranks
    trained = sum(shard_of(one, ranks).nbytes for one in parameters if one.requires_grad) * ranks
    return [
        Collective(kind="all-gather", what="parameters", phase="forward", bytes=gathered, ranks=ranks),
        Collective(kind="reduce-scatter", what="gradients", phase="backward", bytes=trained, ranks=ranks),
    ]
