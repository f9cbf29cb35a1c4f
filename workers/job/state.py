"""Everything of a training but its rows, as it goes into a snapshot beside them: values (JSON) and files (safetensors).

A snapshot is one moment of all of it, so rows, backbone and cursor cannot come apart; that they are those of *this* job
is checked when they are read back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from geartrain.ams.storage.snapshot.folder import Snapshot, latest, list_snapshots, open_snapshot
from geartrain.ams.storage.snapshot.store import place, within
from geartrain.ams.values.errors import ConfigError, InvalidArgument, SnapshotDamaged
from geartrain.ams.values.text import other_format
from geartrain.bridge.rows.state import state_from_bytes, state_to_bytes
from geartrain.workers.data.bitmaps import Preprocessing
from geartrain.workers.data.streams import ReadingPosition
from geartrain.workers.recipes.recipe import Recipe

FORMAT = 1
_BACKBONE, _OPTIMIZER, _RANDOM, _CLASSES = (
    "backbone.safetensors",
    "optimizer.safetensors",
    "random.safetensors",
    "classes.json",
)
_GRAPH = "graph.safetensors"
"""There only if the job selects by a graph, and has one."""
_GRADIENTS = "gradients.safetensors"
"""There only if the job sparsifies its gradients."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a training has come."""

    step: int
    """Updates applied since the beginning."""
    stage_start: int
    """Step at which the current stage began."""
    stage_steps: int
    """Steps of the current stage."""
    table: str
    """Name of the table of class centers, which no other job has."""

    @property
    def is_complete(self) -> bool:
        """Whether the stage has ended."""
        return self.step >= self.stage_start + self.stage_steps


@dataclass(frozen=True, kw_only=True)
class JobState:
    """What a training needs besides its rows to go on as if it had never stopped."""

    recipe: Recipe
    preprocessing: Preprocessing
    progress: Progress
    """Its step is also the position in the learning rate's schedule."""
    cursor: ReadingPosition
    data: dict[str, Any]
    """Where the images came from."""
    class_names: list[str]
    backbone_settings: dict[str, Any]
    """Keyword arguments of the backbone's constructor."""
    backbone: dict[str, Tensor]
    """``state_dict`` of the backbone, batch statistics included."""
    optimizer: dict[str, Any]
    """``state_dict`` of the backbone's optimizer."""
    head: dict[str, Any]
    """Extra state of the head: its table, size, step and selection."""
    random: list[dict[str, Tensor]]
    """State of torch's generators on each rank."""
    graph: bytes | None = None
    """The graph that the head selects by, so that a resumed job goes on with the same one."""
    scheduler: str | None = None
    """Of the cluster that has the rows; None: the worker has them."""
    gradients: dict[str, Any] | None = None
    """``state_dict`` of ``gt.TopKGradients``, if the backbone's gradients are sparsified. Taking it
    gives each rank the mean of all, so a run is that of another to the bit if both take snapshots at the same steps."""

    def values(self) -> dict[str, Any]:
        """Return the part that is JSON."""
        return {
            "format": FORMAT,
            "recipe": self.recipe.to_json(),
            "preprocessing": self.preprocessing.to_json(),
            "progress": asdict(self.progress),
            "cursor": self.cursor.to_json(),
            "data": self.data,
            "backbone_settings": self.backbone_settings,
            "head": self.head,
            "world_size": len(self.random),
            "scheduler": self.scheduler,
        }

    def files(self) -> dict[str, bytes]:
        """Return the rest, as the content of files by name."""
        some = {} if self.graph is None else {_GRAPH: self.graph}
        if self.gradients is not None:
            some[_GRADIENTS] = state_to_bytes(self.gradients)
        return some | {
            _BACKBONE: state_to_bytes(self.backbone),
            _OPTIMIZER: state_to_bytes(self.optimizer),
            _RANDOM: state_to_bytes(self.random),
            _CLASSES: json.dumps(self.class_names, ensure_ascii=False).encode(),
        }

    @classmethod
    def read(cls, snapshot: Snapshot) -> JobState:
        """Read the state of the job that took ``snapshot``. Raises SnapshotDamaged, and ConfigError if no job did."""
        values: Mapping[str, Any] = snapshot.manifest.job
        if values.get("format") != FORMAT or "progress" not in values:
            why = other_format(values.get("format"), FORMAT)
            raise ConfigError(f"the job's state in {snapshot.path} {why}, or give one of 'geartrain worker'")
        files = snapshot.job_files()
        try:
            state = cls(
                recipe=Recipe.from_json(values["recipe"]),
                preprocessing=Preprocessing(**values["preprocessing"]),
                progress=Progress(**values["progress"]),
                cursor=ReadingPosition.from_json(values["cursor"]),
                data=values["data"],
                class_names=json.loads(files[_CLASSES]),
                backbone_settings=values["backbone_settings"],
                backbone=state_from_bytes(files[_BACKBONE]),
                optimizer=state_from_bytes(files[_OPTIMIZER]),
                head=values["head"],
                random=state_from_bytes(files[_RANDOM]),
                graph=files.get(_GRAPH),
                gradients=state_from_bytes(files[_GRADIENTS]) if _GRADIENTS in files else None,
            )
        except (KeyError, TypeError, ValueError, InvalidArgument) as exc:
            raise ConfigError(f"{snapshot.path} does not hold a whole job: {exc!r}") from exc
        state._require_one_job(snapshot)
        return state

    def _require_one_job(self, snapshot: Snapshot) -> None:
        """Raise ConfigError unless the snapshot's rows are those of this state."""
        tables = {str(fields["name"]): fields for fields in snapshot.manifest.tables}
        table, step = self.progress.table, self.progress.step
        found = tables.get(table, {})
        rows = (found.get("num_rows"), found.get("dim"))
        mine = (len(self.class_names), self.recipe.dim)
        if rows != mine or (self.head["table"], self.head["step"]) != (table, step) or snapshot.manifest.step != step:
            raise ConfigError(
                f"{snapshot.path} holds rows of tables {sorted(tables)} at step {snapshot.manifest.step}, but the "
                f"state of a job with table {table!r} of {mine[0]} × {mine[1]} at step {step}: no one job's"
            )


def find_state(root: str | Path, job: str, *, allow_fallback: bool = False) -> tuple[Snapshot, JobState]:
    """Return the newest snapshot of ``job`` in ``root`` and its state.

    Raises SnapshotDamaged if it is damaged; with ``allow_fallback`` everything is read first, and the newest one that
    is sound taken. Raises ConfigError if there is none, or if it is another job's: no job goes on with another's rows.
    """
    if allow_fallback:
        snapshot = latest(root, allow_fallback=True)
    else:
        listed = list_snapshots(root)
        if not listed:
            raise ConfigError(
                f"there is no snapshot in {root}: the run ended before its first; start it "
                "again, with --overwrite in the place of --resume"
            )
        if listed[0].snapshot is None:
            raise listed[0].damage or SnapshotDamaged(f"{listed[0].path} is damaged")
        snapshot = listed[0].snapshot
    return snapshot, _state_of_job(snapshot, job)


def state_of(root: str | Path, name: str, job: str) -> tuple[Snapshot, JobState]:
    """Return the snapshot ``name`` of ``job`` in ``root`` and its state. Raises as :func:`find_state`."""
    snapshot = open_snapshot(within(place(root), name))
    return snapshot, _state_of_job(snapshot, job)


def _state_of_job(snapshot: Snapshot, job: str) -> JobState:
    state = JobState.read(snapshot)
    if state.progress.table != job:
        raise ConfigError(
            f"{snapshot.path} is of job {state.progress.table!r}, not of {job!r}, whose folder this is; move it away"
        )
    return state
