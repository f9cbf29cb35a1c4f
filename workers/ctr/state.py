"""Everything of a click model's training but its rows, as it goes into a snapshot beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from geartrain.ams.storage.snapshot.folder import Snapshot, latest, list_snapshots
from geartrain.ams.values.errors import ConfigError, InvalidArgument, SnapshotDamaged
from geartrain.ams.values.text import other_format
from geartrain.bridge.rows.state import state_from_bytes, state_to_bytes
from geartrain.workers.ctr.recipe import CtrRecipe
from geartrain.workers.data.streams import ReadingPosition
from geartrain.workers.job.state import Progress

FORMAT = "ctr-1"
_TENSORS = "training.safetensors"


@dataclass(frozen=True, kw_only=True)
class CtrState:
    """What a training needs besides its rows to go on as if it had never stopped."""

    recipe: CtrRecipe
    progress: Progress
    cursor: ReadingPosition
    data: dict[str, Any]
    """Where the samples came from, and what they have (``SampleLayout``)."""
    network: dict[str, Tensor]
    optimizer: dict[str, Any]
    fields: dict[str, Any]
    """``state_dict`` of the embeddings: what tells their rows from others."""
    random: dict[str, Tensor]
    """State of torch's generators."""
    scheduler: str | None = None
    """Of the cluster that has the rows; None: the worker has them."""

    def values(self) -> dict[str, Any]:
        """Return the part that is JSON."""
        return {
            "format": FORMAT,
            "recipe": self.recipe.to_json(),
            "progress": asdict(self.progress),
            "cursor": self.cursor.to_json(),
            "data": self.data,
            "scheduler": self.scheduler,
        }

    def files(self) -> dict[str, bytes]:
        """Return the rest, as the content of files by name."""
        parts = {"network": self.network, "optimizer": self.optimizer, "fields": self.fields, "random": self.random}
        return {_TENSORS: state_to_bytes(parts)}

    @classmethod
    def read(cls, snapshot: Snapshot) -> CtrState:
        """Read the state beside the rows of ``snapshot``. Raises SnapshotDamaged, and ConfigError if it has none."""
        values: Mapping[str, Any] = snapshot.manifest.job
        if values.get("format") != FORMAT:
            why = other_format(values.get("format"), FORMAT)
            raise ConfigError(f"the job's state in {snapshot.path} {why}, or give one of 'geartrain worker ctr'")
        try:
            return cls(
                recipe=CtrRecipe.from_json(values["recipe"]),
                progress=Progress(**values["progress"]),
                cursor=ReadingPosition.from_json(values["cursor"]),
                data=values["data"],
                **state_from_bytes(snapshot.job_files()[_TENSORS]),
            )
        except (KeyError, TypeError, ValueError, InvalidArgument) as exc:
            raise ConfigError(f"{snapshot.path} does not hold a whole job: {exc!r}") from exc


def newest_state(root: str, *, allow_fallback: bool = False) -> tuple[Snapshot, CtrState]:
    """The newest snapshot in ``root`` and its state; with ``allow_fallback`` the newest that is sound, which costs
    reading them. Raises SnapshotDamaged, and ConfigError if there is none.
    """
    if allow_fallback:
        snapshot = latest(root, allow_fallback=True)
        return snapshot, CtrState.read(snapshot)
    listed = list_snapshots(root)
    if not listed:
        raise ConfigError(f"there is no snapshot in {root}: the run ended before its first; start it with --overwrite")
    if listed[0].snapshot is None:
        raise listed[0].damage or SnapshotDamaged(f"{listed[0].path} is damaged")
    return listed[0].snapshot, CtrState.read(listed[0].snapshot)
