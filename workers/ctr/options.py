"""Where and how a training of a click model runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from geartrain.ams.values.errors import ConfigError
from geartrain.workers.ctr.recipe import CtrRecipe
from geartrain.workers.job.options import CACHE
from geartrain.workers.loggers.registry import require_loggers


@dataclass(frozen=True, kw_only=True)
class CtrOptions:
    """Where and how a training of a click model runs."""

    out: Path
    """Run folder."""
    recipe: CtrRecipe
    data: str | None = None
    """``movielens``, ``flights``, a Parquet file or folder, or a folder of MovieLens; None: that of the resumed run."""
    cache: Path = CACHE
    """Where what is downloaded is kept."""
    resume: bool = False
    """Go on with the run in ``out``: to the end of its stage, or if that was reached, through another one."""
    resume_steps: int | None = None
    """Steps of that other stage; as many as before by default."""
    continues: bool = False
    """Go on with the run in ``out`` or in ``snapshots`` to the end of its stage; begin it if there is none."""
    stated: tuple[str, ...] = ()
    """Fields of the recipe that the person gave: a run that continues has them already, or is refused."""
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
    max_recoveries: int = 10
    """How often the run goes back to its last snapshot when shards were lost, before it gives up."""
    loggers: tuple[str, ...] = ("tensorboard",)

    def go_on(self) -> str:
        """What a person types to go on with the run."""
        cache = "" if self.cache == CACHE else f" --cache {quote(str(self.cache))}"
        scheduler = f" --scheduler {self.scheduler}" if self.scheduler else ""
        return f"geartrain worker ctr --resume {self.out}{cache}{scheduler}"

    def __post_init__(self) -> None:
        """Raises ConfigError that names the value."""
        require_loggers(self.loggers)
        if self.keep_snapshots < 1:
            raise ConfigError(f"keep_snapshots is {self.keep_snapshots}; it must be at least 1")
        if self.increments < 0:
            raise ConfigError(f"increments is {self.increments}; it must be >= 0")
        if self.snapshot_minutes is not None and not self.snapshot_minutes > 0:
            raise ConfigError(f"snapshot_minutes is {self.snapshot_minutes}; it must be > 0")
