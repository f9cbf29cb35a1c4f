"""Best classes of a feature over all rows: streamed to this process, beside the shards that have them, or on the ranks.

Legend: B samples (of all ranks), S of this rank, or centers of the rows of a chunk, D width, k answers, N rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from geartrain.ams.client.hosted_calls import HostedCalls
from geartrain.ams.programs.class_head import TOP
from geartrain.ams.programs.class_lifecycle import LiveClasses
from geartrain.ams.programs.selection import ActiveClasses
from geartrain.ams.programs.top_classes import MOST_ANSWERS
from geartrain.ams.values.shard_messages import HostedInputs
from geartrain.bridge.head.backends.active_rows import HostActive
from geartrain.bridge.head.backends.pull.stream import Block, RowStream
from geartrain.bridge.head.batch import chunk_bounds, chunk_rows_for, normalise_
from geartrain.bridge.head.loss.chunk_pool import CHUNKS
from geartrain.bridge.head.sub_centers import scores_of_classes
from geartrain.bridge.placements.device_rows import DeviceRows
from geartrain.bridge.placements.workspace import Arithmetic, BufferPool, Scratch, Workspace
from geartrain.bridge.rows.tables import ReadableTable

SAMPLES_AT_ONCE = 1024
_BYTES_PER_ANSWER = 12

TopK = tuple[Tensor, Tensor]
"""Scores [B, k] in the compute dtype, and ids [B, k] int64 of the best classes, best first."""


def top_of_pulled(
    table: ReadableTable,
    active: ActiveClasses,
    features_BD: Tensor,
    k: int,
    *,
    normalised: bool,
    centers: int,
    pool: BufferPool,
) -> TopK:
    """The best of the ``active`` rows, on the features' device. Streams them once for every 1,024 samples."""
    arithmetic = Arithmetic.of(features_BD)
    none = _nothing(features_BD[:0], arithmetic, k)
    queries = torch.split(_queries(features_BD, arithmetic, normalised), SAMPLES_AT_ONCE) if len(features_BD) else ()
    parts = [_top_of_stream(table, active, part_BD, k, normalised, centers, arithmetic, pool) for part_BD in queries]
    return torch.cat([none[0], *(scores for scores, _ in parts)]), torch.cat([none[1], *(ids for _, ids in parts)])


def _top_of_stream(
    table: ReadableTable,
    active: ActiveClasses,
    query_BD: Tensor,
    k: int,
    normalised: bool,
    centers: int,
    arithmetic: Arithmetic,
    pool: BufferPool,
) -> TopK:
    stream = RowStream(table, active, pool, arithmetic.device)
    chunk_rows = chunk_rows_for(len(query_BD), table.spec.dim, arithmetic.device)

    def top_of_chunk(scratch: Scratch, item: tuple[Block, tuple[int, int]]) -> TopK:
        block, (low, high) = item
        work = Workspace(arithmetic, scratch)
        rows_ND = work.load_rows(block.rows_ND[low:high])
        scores, columns = _top_of_rows(work, rows_ND, query_BD, k, normalised, centers)
        return scores, columns + (block.start + low)

    best = _nothing(query_BD, arithmetic, 0)
    for block in stream.blocks():
        chunks = [(block, bounds) for bounds in chunk_bounds(len(block.rows_ND), chunk_rows)]
        best = _best_of([best, *CHUNKS.map(top_of_chunk, chunks, arithmetic.device)], k)
    stream.close()
    if active.sorted_ids is None:
        return best
    return best[0], torch.from_numpy(active.sorted_ids).to(arithmetic.device)[best[1]]  # so far they are positions


def top_of_hosted(
    calls: HostedCalls, features: Tensor, k: int, *, live_classes: LiveClasses, normalised: bool, centers: int = 1
) -> TopK:
    """The best living classes, computed in float32; no row travels. On the features' device.

    One call to each shard, more where features or answers exceed ``part_bytes``: 4·B·D bytes there and 12·B·k back.
    """
    arithmetic = Arithmetic.of(features)
    own_BD = _queries(features, arithmetic, normalised).float().cpu().contiguous()
    width = max(4 * own_BD.shape[1], _BYTES_PER_ANSWER * k)
    at_once = max(1, min(calls.part_bytes // width, MOST_ANSWERS // k))
    settings = {"normalised": float(normalised), "sub_centers": float(centers), "k": float(k)}
    retired = {} if live_classes.are_all else {"retired_runs": live_classes.retired_runs.ravel()}
    scores, ids = ([part] for part in _nothing(own_BD[:0], Arithmetic.of(own_BD), k))
    for part_BD in torch.split(own_BD, at_once) if len(own_BD) else ():
        inputs = (HostedInputs(arrays={"features": part_BD.numpy(), **retired}, settings=settings),)
        answers = calls.compute(TOP, lambda _, inputs=inputs: inputs)  # type: ignore[misc]
        found = _best_of([(torch.tensor(part["scores"]), torch.tensor(part["ids"])) for part in answers], k)
        scores.append(found[0])
        ids.append(found[1])
    return torch.cat(scores).to(features.device, arithmetic.compute), torch.cat(ids).to(features.device)


def top_on_ranks(
    table: DeviceRows, active: ActiveClasses, features_SD: Tensor, k: int, *, normalised: bool, centers: int
) -> TopK:
    """The best ``active`` rows of all ranks, for the rank's own samples [S].

    Every rank calls it, with any number of samples. Collectives: an exchange of one integer, all-gathers of the
    features and of 16 · k bytes a sample and rank.
    """
    link, arithmetic = table.link, Arithmetic.of(features_SD)
    sizes = [size for (size,) in link.exchange([len(features_SD)])]
    joint_BD = link.gather(features_SD.detach().to(arithmetic.compute).contiguous(), sizes)
    here = _top_of_device(table, HostActive.of(active, table.first, table.stop), joint_BD, k, normalised, centers)
    first = sum(sizes[: link.rank])
    own = slice(first, first + sizes[link.rank])
    parts = [link.gather(part, [len(joint_BD)] * link.world_size).view(link.world_size, -1, k)[:, own] for part in here]
    return _best_of(list(zip(*parts, strict=True)), k)


def _top_of_device(
    table: DeviceRows, active: HostActive, joint_BD: Tensor, k: int, normalised: bool, centers: int
) -> TopK:
    """The best of the rows here, filled up to k with scores of −inf."""
    arithmetic, places = Arithmetic.of(joint_BD), active.places(table.device)
    query_BD = _queries(joint_BD, arithmetic, normalised)

    def top_of_chunk(scratch: Scratch, chunk: tuple[int, int]) -> TopK:
        work = Workspace(arithmetic, scratch)
        place = places.chunk(*chunk)
        rows_ND = table.load(work, place, name="rows")
        scores, columns = _top_of_rows(work, rows_ND, query_BD, k, normalised, centers)
        numbers = columns + place.start if isinstance(place, slice) else place[columns]
        return scores, numbers + table.first

    chunks = chunk_bounds(active.num, chunk_rows_for(len(query_BD), table.spec.dim, arithmetic.device))
    found = CHUNKS.map(top_of_chunk, chunks, arithmetic.device) if chunks else []
    return _best_of([_nothing(query_BD, arithmetic, k), *found], k)


def _queries(features_BD: Tensor, arithmetic: Arithmetic, normalised: bool) -> Tensor:
    """A copy of the features as they meet rows."""
    own_BD = features_BD.detach().to(arithmetic.compute, copy=True)
    if normalised:
        normalise_(own_BD)
    return own_BD


def _nothing(query_BD: Tensor, arithmetic: Arithmetic, k: int) -> TopK:
    scores = torch.full((len(query_BD), k), -torch.inf, dtype=arithmetic.compute, device=arithmetic.device)
    return scores, torch.zeros_like(scores, dtype=torch.int64)


def _top_of_rows(work: Workspace, rows_ND: Tensor, query_BD: Tensor, k: int, normalised: bool, centers: int) -> TopK:
    """The best of a chunk, which is overwritten: numbers of its rows."""
    unit_SD = rows_ND.view(-1, query_BD.shape[1])
    if normalised:
        normalise_(unit_SD)
    scores_BN = scores_of_classes(work.product("logits", query_BD, unit_SD.t()), centers)
    scores, columns = scores_BN.topk(min(k, scores_BN.shape[1]), dim=1)
    return scores, columns


def _best_of(found: Sequence[TopK], k: int) -> TopK:
    scores, ids = (torch.cat(parts, dim=1) for parts in zip(*found, strict=True))
    best, order = scores.topk(min(k, scores.shape[1]), dim=1)
    return best, ids.gather(1, order)
