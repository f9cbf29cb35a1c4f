"""Files of tensors that are divided by rows among ranks (DTensors of FSDP2 and split layers, divided graphs).

    PATH/rank-ID-RANK-N.safetensors    rows of some tensors, 64 MiB at most
    PATH/rank-ID-RANK.json             index of these rows, until ``model.json`` has it

Each rank writes its own files. No rank holds a whole tensor, and a reader opens only files with rows that it needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import load, save
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from geartrain.ams.storage.durable import create_folders, write_file
from geartrain.ams.storage.snapshot.manifest import seal_json, unseal_json
from geartrain.ams.values.errors import InvalidArgument, ModelDamaged, SpecMismatch
from geartrain.bridge.rows.serialization import RowsOfRank, ShardedTensorRef

PIECE_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class RankFile:
    """Entry of one file."""

    file: str
    bytes: int
    xxh3_128: str
    rows: dict[str, list[int]]
    """First row and the one behind the last, by name of the tensor."""


@dataclass(frozen=True)
class _OwnRows:
    first: int
    rows: Tensor


def is_divided(value: Any) -> bool:
    """Return whether it is a DTensor."""
    return isinstance(value, Tensor) and hasattr(value, "device_mesh")


def extract_sharded(content: Any) -> tuple[Any, dict[str, _OwnRows]]:
    """Return ``content`` with a mark in place of each DTensor and RowsOfRank, and this rank's rows of them.

    ``content`` is nested dicts, lists and tuples. No copies, no collectives. Raises InvalidArgument for a tensor that
    is not divided by rows over one group of ranks.
    """
    own: dict[str, _OwnRows] = {}

    def walk(value: Any, place: str) -> Any:
        if isinstance(value, Mapping) and not isinstance(value, Counter):
            return {key: walk(item, f"{place}[{key!r}]") for key, item in value.items()}
        if isinstance(value, list | tuple):
            walked = [walk(item, f"{place}[{number}]") for number, item in enumerate(value)]
            return walked if isinstance(value, list) else tuple(walked)
        if isinstance(value, RowsOfRank):
            own[place] = _OwnRows(value.first, value.rows)
            return _mark(place, (value.total, *value.rows.shape[1:]), value.rows.dtype)
        if not is_divided(value):
            return value
        rows = _rows_here(value, place)
        local = value.detach().to_local()
        if rows is None:
            return local
        own[place] = _OwnRows(rows.start, local)
        return _mark(place, tuple(value.shape), value.dtype)

    return walk(content, "state"), own


def _mark(place: str, shape: tuple[int, ...], dtype: torch.dtype) -> ShardedTensorRef:
    return ShardedTensorRef(place, shape, str(dtype).removeprefix("torch."))


def _rows_here(tensor: Any, place: str) -> range | None:
    """Return this rank's rows of a DTensor; None if every rank has all rows. Raises InvalidArgument."""
    mesh, placements = tensor.device_mesh, tensor.placements
    if mesh.ndim == 1 and placements[0].is_replicate():
        return None
    if mesh.ndim != 1 or not placements[0].is_shard(0):
        raise InvalidArgument(
            f"{place} is a DTensor with placements {placements} over a mesh {tuple(mesh.shape)}; geartrain.save takes "
            "those divided by rows over one group of ranks, (Shard(0),). Save others with torch.distributed.checkpoint"
        )
    each = -(-tensor.shape[0] // mesh.size())
    return range(min(mesh.get_local_rank() * each, len(tensor)), min((mesh.get_local_rank() + 1) * each, len(tensor)))


def write_rows(folder: Path, model_id: str, rank: int, own: Mapping[str, _OwnRows]) -> None:
    """Write this rank's rows, synced. Memory: two pieces. Raises OSError."""
    create_folders(folder)
    pieces: list[RankFile] = []
    waiting: dict[str, _OwnRows] = {}

    def write() -> None:
        data = save({name: item.rows.cpu().clone().contiguous() for name, item in waiting.items()})
        file = f"rank-{model_id}-{rank}-{len(pieces)}.safetensors"
        write_file(folder / file, data)
        rows = {name: [item.first, item.first + len(item.rows)] for name, item in waiting.items()}
        pieces.append(RankFile(file=file, bytes=len(data), xxh3_128=xxhash.xxh3_128_hexdigest(data), rows=rows))
        waiting.clear()

    for name, part in _parts(own):
        if name in waiting or sum(item.rows.nbytes for item in waiting.values()) + part.rows.nbytes > PIECE_BYTES:
            write()
        waiting[name] = part
    if waiting:
        write()
    write_file(_index(folder, model_id, rank), seal_json({"pieces": [vars(piece) for piece in pieces]}))


def _parts(own: Mapping[str, _OwnRows]) -> Iterable[tuple[str, _OwnRows]]:
    for name, item in own.items():
        step = max(1, PIECE_BYTES * len(item.rows) // max(1, item.rows.nbytes))
        for start in range(0, len(item.rows), step):
            yield name, _OwnRows(item.first + start, item.rows[start : start + step])


def _index(folder: Path, model_id: str, rank: int) -> Path:
    return folder / f"rank-{model_id}-{rank}.json"


def collect_pieces(folder: Path, model_id: str, content: Any) -> list[RankFile]:
    """Return the files of all ranks. Raises SpecMismatch unless they hold every row of ``content`` once."""
    pieces: list[RankFile] = []
    for path in sorted(folder.glob(f"rank-{model_id}-*.json")):
        pieces += [RankFile(**piece) for piece in unseal_json(path.read_bytes())["pieces"]]
        path.unlink()
    for apart in (leaf for leaf in tree_leaves(content) if isinstance(leaf, ShardedTensorRef)):
        done = 0
        for first, stop in sorted(piece.rows[apart.name] for piece in pieces if apart.name in piece.rows):
            if first != done:
                break
            done = stop
        if done != apart.shape[0]:
            raise SpecMismatch(
                f"row {done} of {apart.name} was written by no rank, or by several: every rank saves the same model "
                f"with the same state=, to a folder that all of them see ({folder})"
            )
    return pieces


class DividedRows:
    """Reader of the files that :func:`write_rows` wrote, for any rows."""

    def __init__(self, folder: Path, pieces: Iterable[RankFile]) -> None:
        self._folder = folder
        self._pieces = list(pieces)
        self._last: tuple[str, dict[str, Tensor]] = ("", {})

    def like(self, here: Any, value: Any) -> Any:
        """Return ``value`` (a tensor or its mark) divided as ``here`` is: on the host, whole or this rank's rows."""
        if not isinstance(value, Tensor | ShardedTensorRef):
            return value
        if not is_divided(here):
            return self.whole(value)
        rows = _rows_here(here, "a tensor of this model")
        if rows is None:
            rows = range(value.shape[0])
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            self.some(value, rows).to(here.device).contiguous(),
            here.device_mesh,
            here.placements,
            run_check=False,
            shape=here.shape,
            stride=here.stride(),
        )

    def some(self, value: Tensor | ShardedTensorRef, rows: range) -> Tensor:
        """Return ``rows`` of a tensor, or of the one that a mark names."""
        return self._rows(value, rows) if isinstance(value, ShardedTensorRef) else value[rows.start : rows.stop]

    def whole(self, content: Any) -> Any:
        """Return ``content`` with whole tensors."""
        return tree_map_only(ShardedTensorRef, lambda apart: self._rows(apart, range(apart.shape[0])), content)

    def _rows(self, apart: ShardedTensorRef, wanted: range) -> Tensor:
        out = torch.empty(len(wanted), *apart.shape[1:], dtype=getattr(torch, apart.dtype), device="cpu")
        for piece in self._pieces:
            first, stop = piece.rows.get(apart.name, (0, 0))
            begin, end = max(first, wanted.start), min(stop, wanted.stop)
            if begin < end:
                there = self._read(piece)[apart.name]
                out[begin - wanted.start : end - wanted.start] = there[begin - first : end - first]
        return out

    def _read(self, piece: RankFile) -> dict[str, Tensor]:
        """Return the tensors of a file; the last file read is cached. Raises ModelDamaged."""
        if self._last[0] != piece.file:
            path = self._folder / piece.file
            try:
                data = path.read_bytes()
            except OSError as exc:
                raise ModelDamaged(f"{path} cannot be read: {exc}; bring the folder back from a copy") from exc
            if len(data) != piece.bytes or xxhash.xxh3_128_hexdigest(data) != piece.xxh3_128:
                raise ModelDamaged(
                    f"{path} is damaged: its content does not match its checksum in model.json; bring the folder back "
                    "from a copy, or save the model again"
                )
            self._last = (piece.file, load(data))
        return self._last[1]


def state_like(one: Any, state: Any, rows: DividedRows) -> Any:
    """Return the saved ``state_dict`` for ``one``: an optimizer's tensors as its parameters are, others whole."""
    if not isinstance(state, Mapping) or not hasattr(one, "param_groups") or "param_groups" not in state:
        return rows.whole(state)
    parameters = [parameter for group in one.param_groups for parameter in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    if len(parameters) != len(numbers):  # the optimizer raises for it
        return rows.whole(state)
    parameter_of = dict(zip(numbers, parameters, strict=True))

    def placed(number: Any, value: Any) -> Any:
        parameter = parameter_of.get(number)
        if parameter is not None and isinstance(value, Tensor | ShardedTensorRef) and value.shape == parameter.shape:
            return rows.like(parameter, value)
        return rows.whole(value)

    placed_state = {
        number: {name: placed(number, value) for name, value in values.items()}
        for number, values in state["state"].items()
    }
    return {**rows.whole({key: value for key, value in state.items() if key != "state"}), "state": placed_state}
