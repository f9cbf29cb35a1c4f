"""What a job is asked to do, on which data, and how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from geartrain.ams.values.errors import ConfigError
from geartrain.workers.data.bitmaps import Preprocessing
from geartrain.workers.data.images import Images, Unreadable
from geartrain.workers.loggers.registry import require_loggers
from geartrain.workers.recipes.recipe import PLACES, Recipe

CACHE = Path(".cache")
"""Where downloads are kept unless another folder is named."""
DTYPES = ("auto", "float32", "bfloat16")


@dataclass(frozen=True)
class JobData:
    """What a job trains on."""

    class_names: list[str]
    train: Images
    held_out: Mapping[str, Images]
    """Name -> images of a test; training never sees them."""
    source: dict[str, Any]
    """How to find the same data again when the run is resumed."""
    chooses_model: bool = False
    """Whether the first of ``held_out`` is a validation by which the model that is kept is chosen."""
    unreadable: Unreadable = field(default_factory=lambda: Unreadable(skip=False))
    """The pictures that were passed over so far."""


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """Where and how a job runs."""

    out: Path
    """Run folder."""
    recipe: Recipe
    preprocessing: Preprocessing
    resume: bool = False
    """Go on with the run in ``out``: to the end of its stage, or if that was reached, through another one."""
    resume_steps: int | None = None
    """Steps of that other stage; as many as before by default."""
    continues: bool = False
    """Go on with the run in ``out`` or in ``snapshots`` to the end of its stage; begin it if there is none."""
    stated: tuple[str, ...] = ()
    """Fields of the recipe that the person gave: a run that continues has them already, or is refused."""
    stated_look: tuple[str, ...] = ()
    """The same of ``preprocessing``."""
    allow_fallback: bool = False
    """When resuming, take the newest sound snapshot if the newest one is damaged."""
    overwrite: bool = False
    """Start over where ``out`` holds a run already."""
    snapshots: str | None = None
    """Folder or URL for the snapshots, which the shards see as this process does; ``out``/snapshots by default."""
    snapshot_minutes: float | None = None
    """Take one at least so often, besides those every ``recipe.save_every`` steps."""
    keep_snapshots: int = 2
    """Snapshots that stay, with those they add to."""
    increments: int = 0
    """Snapshots of only the rows written since the one before, between two of all rows."""
    scheduler: str | None = None
    """host:port of a cluster's scheduler; by default that of the resumed run, or one shard is embedded in this process
    ("none": so, though the run had its rows in a cluster)."""
    graph: str | None = None
    """host:port of the cluster's graph service; by default a head that selects by a graph builds it here."""
    max_recoveries: int = 10
    """How often the job goes back to its last snapshot when shards were lost, before it gives up."""
    rows: str | None = None
    """Where the work on the class centers is done from now on; None: where the recipe, or the resumed run, says."""
    device: str = "auto"
    dtype: str = "auto"
    """Of the backbone's products: ``float32``, ``bfloat16`` (autocast), or ``auto``: bfloat16 where it is faster."""
    loggers: tuple[str, ...] = ("tensorboard",)
    """Where its numbers are logged; see :mod:`geartrain.workers.loggers`."""
    sweep: bool = False
    """Whether a new run finds its learning rate by short trials; else the recipe's is taken."""
    backbone: str | None = None
    """The backbone that the person named: only then is code of their own imported."""
    command: str = "classify"
    """Of ``geartrain worker``, with what it must be told again to go on."""

    def go_on(self, launcher: str = "") -> str:
        """What a person types to go on with the run; ``launcher`` is that of the ranks."""
        scheduler = f" --scheduler {self.scheduler}" if self.scheduler else ""
        graph = f" --graph {self.graph}" if self.graph else ""
        return f"{launcher}geartrain worker {self.command} --resume {self.out}{scheduler}{graph}"

    def __post_init__(self) -> None:
        if self.keep_snapshots < 1:
            raise ConfigError(f"keep_snapshots is {self.keep_snapshots}; it must be at least 1")
        if self.increments < 0:
            raise ConfigError(f"increments is {self.increments}; it must be >= 0")
        if self.rows not in (None, *PLACES):
            raise ConfigError(f"rows is {self.rows!r}; it must be one of {', '.join(PLACES)}")
        require_loggers(self.loggers)
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype is {self.dtype!r}; it must be one of {', '.join(DTYPES)}")
        if self.snapshot_minutes is not None and not self.snapshot_minutes > 0:
            raise ConfigError(f"snapshot_minutes is {self.snapshot_minutes}; it must be > 0")


@dataclass(frozen=True)
class JobResult:
    """How a job ended."""

    finished: bool
    """False: a signal stopped it."""
    report: dict[str, Any] | None
    step: int
    is_saved: bool = True
    """Whether it can be gone on with."""
