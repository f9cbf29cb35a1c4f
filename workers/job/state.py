"""State of a training beside its rows, as stored in a snapshot: values (JSON) and files (safetensors).

A snapshot is one moment of all of it, so rows, network and cursor always match; reading checks that they are those of
*this* job.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from geartrain.ams.storage.snapshot.folder import Snapshot, latest, list_snapshots, open_snapshot
from geartrain.ams.storage.snapshot.store import place, within
from geartrain.ams.values.errors import ConfigError, InvalidArgument, SnapshotDamaged
from geartrain.ams.values.text import of_another_version, other_format
from geartrain.bridge.rows.serialization import state_from_bytes, state_to_bytes
from geartrain.workers.job.keys import as_json, recipe_of
from geartrain.workers.job.options import ENDLESS

FORMAT = 1
_TENSORS = "training.safetensors"


@dataclass(frozen=True, kw_only=True)
class JobProgress:
    """Progress of a training."""

    step: int
    """Updates applied since the beginning."""
    stage_start: int
    """Step at which the current stage began."""
    stage_steps: int
    """Steps of the current stage."""
    table: str
    """Name of the job, a prefix of its tables' names: unique to it."""
    best: dict[str, Any] | None = None
    """Best validation so far, with its ``step``, of which there is a snapshot; None: without validation."""

    @property
    def is_complete(self) -> bool:
        """Whether the stage has ended."""
        return self.step >= self.stage_start + self.stage_steps

    @property
    def last_step(self) -> int:
        """Last step of the stage; 0: its samples end it, or a person."""
        return self.stage_start + self.stage_steps if self.stage_steps < ENDLESS else 0

    @property
    def part(self) -> tuple[int, int]:
        """Position in the learning-rate schedule: steps of the stage done, and all of them."""
        return self.step - self.stage_start, self.stage_steps


@dataclass(frozen=True, kw_only=True)
class JobState:
    """State, beside the rows, from which a training resumes as if it had never stopped."""

    job: str
    """Kind of job: that of ``geartrain worker``."""
    recipe: Any
    progress: JobProgress
    cursor: dict[str, int]
    data: dict[str, Any]
    """JSON: source of the samples, and other facts of the job."""
    tensors: dict[str, Any]
    """``state_dict`` of optimizer and networks, and under ``random`` that of torch's generators on each rank."""
    files: dict[str, bytes] = field(default_factory=dict)
    """Files of other formats, by name."""
    scheduler: str | None = None
    """Scheduler of the cluster that has the rows; None: the worker has them."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds of each part of the training so far, those of earlier processes included."""

    def values(self) -> dict[str, Any]:
        """Return the part that is JSON."""
        return {
            "format": FORMAT,
            "job": self.job,
            "recipe": as_json(self.recipe),
            "progress": asdict(self.progress),
            "cursor": self.cursor,
            "data": self.data,
            "world_size": len(self.tensors["random"]),
            "scheduler": self.scheduler,
            "phases": self.phases,
        }

    def all_files(self) -> dict[str, bytes]:
        """Return the rest, as the content of files by name."""
        return {**self.files, _TENSORS: state_to_bytes(self.tensors)}

    @classmethod
    def read(cls, snapshot: Snapshot, job: str, recipe_class: type) -> JobState:
        """Read the state of the ``job`` that took ``snapshot``. Raises SnapshotDamaged, and ConfigError if none did."""
        values: Mapping[str, Any] = snapshot.manifest.job
        if values.get("format") != FORMAT or "progress" not in values:
            why = other_format(values.get("format"), FORMAT)
            raise ConfigError(f"the job's state in {snapshot.path} {why}, or give one of 'geartrain worker'")
        if values.get("job") != job:
            raise ConfigError(
                f"{snapshot.path} was taken by 'geartrain worker {values.get('job')}', not '{job}'; resume it so"
            )
        files = snapshot.job_files()
        try:
            state = cls(
                job=job,
                recipe=recipe_of(recipe_class, values["recipe"], "the saved recipe"),
                progress=JobProgress(**values["progress"]),
                cursor=dict(values["cursor"]),
                data=values["data"],
                tensors=state_from_bytes(files.pop(_TENSORS)),
                files=files,
                scheduler=values["scheduler"],
                phases=dict(values.get("phases", {})),
            )
        except (KeyError, TypeError, ValueError, InvalidArgument) as exc:
            raise ConfigError(f"the job's state in {snapshot.path} {of_another_version(repr(exc))}") from exc
        if snapshot.manifest.step != state.progress.step:
            raise ConfigError(
                f"{snapshot.path} holds rows of step {snapshot.manifest.step}, but the state of a job at step "
                f"{state.progress.step}: no one job's"
            )
        return state


def newest_snapshot(root: str | Path, *, allow_fallback: bool = False) -> Snapshot:
    """Return the newest snapshot in ``root``.

    Raises SnapshotDamaged if it is damaged; with ``allow_fallback`` everything is read first, and the newest sound one
    is returned. Raises ConfigError if there is none, SnapshotNotFound with ``allow_fallback``.
    """
    if allow_fallback:
        return latest(root, allow_fallback=True)
    listed = list_snapshots(root)
    if not listed:
        raise ConfigError(
            f"there is no snapshot in {root}: the run ended before its first; start it "
            "again, with --overwrite in the place of --resume"
        )
    if listed[0].snapshot is None:
        raise listed[0].damage or SnapshotDamaged(f"{listed[0].path} is damaged")
    return listed[0].snapshot


def best_snapshot(root: str | Path) -> Snapshot:
    """Return the snapshot of the best step recorded in the newest one in ``root``, else the newest itself.

    Raises as :func:`newest_snapshot`.
    """
    newest = newest_snapshot(root)
    progress: Mapping[str, Any] = newest.manifest.job.get("progress") or {}  # type: ignore[assignment]
    best = progress.get("best")
    if best is None:
        return newest
    known = (newest, *(listed.snapshot for listed in list_snapshots(root) if listed.snapshot is not None))
    return next((snapshot for snapshot in known if snapshot.manifest.step == best["step"]), newest)


def snapshot_named(root: str | Path, name: str) -> Snapshot:
    """Return the snapshot ``name`` in ``root``."""
    return open_snapshot(within(place(root), name))
