"""Folder format of a saved model.

    PATH/model.json                the modules, tables, and the other files with their checksums (XXH3); sealed
    PATH/state-ID.safetensors      parameters, buffers and other state, see geartrain.bridge.rows.serialization
    PATH/rows-ID-0/                a snapshot of the tables of one cluster, or of the rows of one head on ranks
    PATH/rank-ID-0-0.safetensors   rows of parameters and of their optimizer's state that are divided among ranks

It is a folder because shards and ranks write their rows themselves, side by side. Every save writes files of a new ID;
``model.json`` is replaced last, in one rename. So a crash leaves the old model or the new one, never a mixture.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from geartrain.ams.observe import failpoints
from geartrain.ams.storage.durable import create_folders, sync_folder, write_file
from geartrain.ams.storage.sealed import read_sealed
from geartrain.ams.storage.snapshot.folder import Snapshot, open_snapshot
from geartrain.ams.storage.snapshot.manifest import seal_json
from geartrain.ams.values.arguments import path_name
from geartrain.ams.values.errors import ConfigError, InvalidArgument, ModelDamaged, SnapshotError
from geartrain.ams.values.text import of_another_version
from geartrain.bridge.checkpoint.rank_rows import RankFile
from geartrain.bridge.rows.serialization import state_from_bytes, state_to_bytes

MODEL = "model.json"
FORMAT = 2
"""Version of the folder format; 1 had no pieces."""
_ID = r"[0-9a-f]{32}"
_OURS = re.compile(
    rf"(?:state|rows|rank)-({_ID})(?:\.safetensors|-\d+|-\d+\.json|-\d+-\d+\.safetensors)|\.(?:staging|trash|part)-.*"
)
_AGAIN = "save the model again"
_REMEDY = f"bring the folder back from a copy, or {_AGAIN}"


@dataclass(frozen=True, kw_only=True)
class SavedRows:
    """Entry of one snapshot in the folder."""

    folder: str
    """Name of its folder."""
    id: str
    """Id in its manifest."""
    modules: list[str]
    """Names of the modules whose rows it holds."""


@dataclass(frozen=True, kw_only=True)
class ModelRecord:
    """The content of ``model.json``."""

    id: str
    """32 hexadecimal digits, new for every save."""
    state_bytes: int
    state_xxh3_128: str
    """Checksum of the file of the state."""
    rows: list[SavedRows]
    modules: dict[str, list[str]]
    """Names of the tables, by name of the module."""
    pieces: list[RankFile] = field(default_factory=list)
    """Files of tensors that are divided among ranks."""
    about: dict[str, Any] = field(default_factory=dict)
    """JSON values for people, and for tools that rebuild the model."""

    @property
    def state_file(self) -> str:
        """Name of the file of the state."""
        return f"state-{self.id}.safetensors"


def model_folder(path: str | Path) -> Path:
    """Return ``path`` as a folder. Raises InvalidArgument."""
    path = path_name("path", path, "the name of a folder")
    if isinstance(path, str) and "://" in path:
        raise InvalidArgument(
            f"path is {path!r}; a model is saved in a folder. Copy it, or take Cluster.snapshot(url, files=...) there"
        )
    return Path(path).absolute()


def require_model_folder(folder: Path) -> None:
    """Raise InvalidArgument unless a model may be saved there: the folder is absent, empty, or a saved model."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise InvalidArgument(f"{folder} is a file; a model is saved in a folder")
    foreign = [item.name for item in folder.iterdir() if item.name != MODEL and not _OURS.fullmatch(item.name)]
    if foreign:
        raise InvalidArgument(f"{folder} holds other files ({min(foreign)}); give a folder of its own, or a new name")


def write_state(folder: Path, model_id: str, state: Any) -> tuple[int, str]:
    """Write the file of the state, synced; return its length and checksum. Raises InvalidArgument, OSError."""
    data = state_to_bytes(state)
    create_folders(folder)
    write_file(folder / f"state-{model_id}.safetensors", data)
    return len(data), xxhash.xxh3_128_hexdigest(data)


def publish(folder: Path, record: ModelRecord) -> None:
    """Publish the written files as the model of the folder, in one step. Raises InvalidArgument, OSError."""
    content = {
        "format": FORMAT,
        "created": time.time(),
        "id": record.id,
        "state": {"file": record.state_file, "bytes": record.state_bytes, "xxh3_128": record.state_xxh3_128},
        "rows": [vars(rows) for rows in record.rows],
        "modules": record.modules,
        "about": record.about,
        "pieces": [vars(piece) for piece in record.pieces],
    }
    data = seal_json(content)
    sync_folder(folder)
    failpoints.reach("model.publish.before")
    write_file(folder / MODEL, data)
    sync_folder(folder)


def sweep(folder: Path) -> None:
    """Remove the files of all saves but the one that ``model.json`` names, as far as that is possible."""
    kept = ""  # no model is there
    if os.path.lexists(folder / MODEL):
        try:
            kept = read_record(folder).id
        except (ConfigError, ModelDamaged):  # its files may be all that is left of it, or those of another version
            return
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _OURS.fullmatch(path.name)
        if match is None or kept == match[1]:
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def read_record(folder: Path) -> ModelRecord:
    """Return the record. Raises ConfigError if no model was saved there, or in another format; ModelDamaged."""
    path = folder / MODEL
    content = read_sealed(path, FORMAT, f"is {folder} the folder that geartrain.save wrote?", _AGAIN)
    try:
        return ModelRecord(
            id=content["id"],
            state_bytes=content["state"]["bytes"],
            state_xxh3_128=content["state"]["xxh3_128"],
            rows=[SavedRows(**rows) for rows in content["rows"]],
            modules=content["modules"],
            pieces=[RankFile(**piece) for piece in content["pieces"]],
            about=content["about"],
        )
    except (KeyError, TypeError) as exc:
        raise ConfigError(f"{path} {of_another_version(f'it lacks {exc}')}, or {_AGAIN}") from exc


def read_state(folder: Path, record: ModelRecord) -> Any:
    """Return the state that :func:`write_state` wrote, its tensors on the host. Raises ModelDamaged."""
    path = folder / record.state_file
    try:
        data = path.read_bytes()
    except OSError as exc:
        raise ModelDamaged(f"{path} cannot be read: {exc}; {_REMEDY}") from exc
    if len(data) != record.state_bytes or xxhash.xxh3_128_hexdigest(data) != record.state_xxh3_128:
        raise ModelDamaged(f"{path} is damaged: its content does not match its checksum in {MODEL}; {_REMEDY}")
    return state_from_bytes(data)


def open_rows(folder: Path, rows: SavedRows) -> Snapshot:
    """Open one of the snapshots of the folder. Raises ModelDamaged, SnapshotDamaged."""
    try:
        snapshot = open_snapshot(folder / rows.folder)
    except SnapshotError as exc:
        raise ModelDamaged(f"{folder / rows.folder} cannot be used: {exc}; {_REMEDY}") from exc
    if snapshot.manifest.id != rows.id:
        raise ModelDamaged(f"{folder / rows.folder} is of another save than {MODEL}; {_REMEDY}")
    return snapshot
