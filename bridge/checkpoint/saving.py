"""Saving of a model with its rows and training state as one folder (``gt.save``)."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from geartrain.ams.storage.durable import failed
from geartrain.ams.storage.snapshot.folder import open_snapshot
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.text import quoted
from geartrain.bridge.checkpoint.folder import (
    ModelRecord,
    SavedRows,
    model_folder,
    publish,
    require_model_folder,
    sweep,
    write_state,
)
from geartrain.bridge.checkpoint.modules_with_rows import (
    PlainNames,
    divided_states,
    group_of,
    on_first,
    placements_of,
    require_between_steps,
    together,
)
from geartrain.bridge.checkpoint.rank_rows import collect_pieces, extract_sharded, write_rows
from geartrain.bridge.collectives.communicator import Communicator
from geartrain.bridge.placements.placement import Placement

if TYPE_CHECKING:
    from geartrain.ams.client.cluster import Cluster

T = TypeVar("T")

_HALF = 2**62 - 1
"""Mask of half an id: ranks exchange int64."""


def save(model: nn.Module, path: str | Path, *, state: Mapping[str, Any] | None = None) -> Path:
    """Write ``model`` with all of its rows to the folder ``path``; return it. :func:`load` reads it. No pickle.

    The folder holds the ``state_dict`` of the module and, as snapshots, every table of its parts: class heads with
    momentum or other slots, slow gears, modules under :func:`geartrain.attach`. All files have checksums. An existing
    model is replaced in one step: a crash leaves the old one or the new one. Call it between two steps. Wrappers of
    DistributedDataParallel, torch.compile and geartrain.parallelize are ignored.

    Every rank must call it if ranks train rows together, or hold parts of the model (:func:`geartrain.parallelize`,
    FSDP2) or of ``state`` (:class:`geartrain.TopKGradients`, which is merged). All ranks pass the same folder, which
    all ranks and shards can reach.

    Rows are streamed with a buffer of 16 MiB for each shard or rank, for any number of rows. Each rank writes its own
    parts of DTensors in the model and in ``state``, and its part of the KNN softmax graph, 64 MiB at a time. Nothing
    is gathered. The rest of the ``state_dict`` is held in memory twice.

    Args:
        model: A module; it need not have rows.
        path: A folder that does not exist, is empty, or holds a saved model.
        state: More values to save, under names that you choose. Allowed are objects with ``state_dict()`` (optimizers,
            RowOptimizer, LR schedulers, GradScaler), and numbers, strings, tensors, arrays, dicts and lists (the epoch,
            ``torch.get_rng_state()``, ``numpy.random.get_state()``).

    Raises:
        InvalidArgument: Gradients wait for a step, a value cannot be saved, the folder holds something else, a module
            with rows has no placement, or a DTensor is divided other than by rows.
        SnapshotFailed: The disk failed; the old model is unchanged.
        SnapshotRefused, ShardUnavailable: A shard cannot write its rows.
        SyncError: Another rank failed.
    """
    folder, plain = model_folder(path), PlainNames(model)
    placements = placements_of(model)
    group = group_of(model, placements, state)
    what = f"the model was not saved in {folder}"
    model_id = _new_id(group)

    def write_own() -> dict[str, Any]:
        require_between_steps(model)
        for placement in placements.values():
            placement.flush()
        graphs = {name: graph for name, placement in placements.items() if (graph := placement.graph_state())}
        content = {
            "model": {plain(name): value for name, value in model.state_dict().items()},
            "graphs": graphs,
            **_split(state or {}),
        }
        left: dict[str, Any]
        left, own = extract_sharded(content)
        if own:
            write_rows(folder, model_id, 0 if group is None else group.rank, own)
        return left

    together(group, lambda: require_model_folder(folder), what)
    for item in divided_states(state):
        item.merge()
    rows: list[SavedRows] = []
    try:
        # Every rank gathers, as some modules have state on all ranks; the first one writes.
        content = together(group, partial(_on_disk, write_own, what), what)
        for name, placement in placements.items():
            if placement.cluster is None:
                saved = _rows_name(model_id, rows)
                placement.snapshot(folder, saved)
                rows.append(together(group, partial(_saved_rows, folder, saved, [name]), what))
        on_first(group, lambda: _write(folder, model_id, placements, content, rows), what)
    finally:
        if group is None or group.rank == 0:
            sweep(folder)
    return folder


def _write(
    folder: Path, model_id: str, placements: dict[str, Placement], content: dict[str, Any], rows: list[SavedRows]
) -> None:
    for cluster, names in _by_cluster(placements):
        saved = _rows_name(model_id, rows)
        tables = [spec.name for name in names for spec in placements[name].specs()]
        cluster.snapshot(folder, saved, tables=tables, graphs=False).result()
        rows.append(_saved_rows(folder, saved, names))

    def write() -> None:
        length, checksum = write_state(folder, model_id, content)
        record = ModelRecord(
            id=model_id,
            state_bytes=length,
            state_xxh3_128=checksum,
            rows=rows,
            modules={name: [spec.name for spec in placement.specs()] for name, placement in placements.items()},
            pieces=collect_pieces(folder, model_id, content),
        )
        publish(folder, record)

    _on_disk(write, f"the model was not saved in {folder}")


def _on_disk(action: Callable[[], T], what: str) -> T:
    try:
        return action()
    except OSError as exc:
        raise failed(what, exc) from exc


def _saved_rows(folder: Path, saved: str, modules: list[str]) -> SavedRows:
    return SavedRows(folder=saved, id=open_snapshot(folder / saved).manifest.id, modules=modules)


def _rows_name(model_id: str, before: list[SavedRows]) -> str:
    return f"rows-{model_id}-{len(before)}"


def _new_id(group: Communicator | None) -> str:
    """Return 32 hexadecimal digits, the same on every rank."""
    number = uuid.uuid4().int
    halves = [number >> 64 & _HALF, number & _HALF]
    first, second = halves if group is None else group.exchange(halves)[0]
    return f"{first:016x}{second:016x}"


def _by_cluster(placements: Mapping[str, Placement]) -> list[tuple[Cluster, list[str]]]:
    """Return the clusters that hold rows, each with the names of its modules."""
    found: dict[int, tuple[Cluster, list[str]]] = {}
    for name, placement in placements.items():
        if placement.cluster is not None:
            found.setdefault(id(placement.cluster), (placement.cluster, []))[1].append(name)
    return list(found.values())


def _split(state: Mapping[str, Any]) -> dict[str, Any]:
    """Split ``state`` into objects with a state_dict and plain values. Raises InvalidArgument."""
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise InvalidArgument(f"state is {quoted(state)}; it must be a dict with names for keys")
    objects = {name: value.state_dict() for name, value in state.items() if hasattr(value, "state_dict")}
    return {"objects": objects, "values": {name: value for name, value in state.items() if name not in objects}}
