"""Options of a job, and its outcome."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from geartrain.ams.values.errors import ConfigError
from geartrain.workers.loggers.registry import require_loggers

ENDLESS = 2**40
"""Number of steps of a stage that is ended by its samples, or by a person."""
CACHE = Path(".cache")
"""Default folder of downloads."""


@dataclass(frozen=True, kw_only=True)
class SnapshotSettings:
    """Schedule and retention of a job's snapshots; a resumed run may have others."""

    steps: int = 200
    """Steps between two snapshots."""
    minutes: float | None = None
    """Longest time between two snapshots, in minutes; None: by steps alone."""
    keep: int = 2
    """Number of snapshots kept, with those they build on."""
    increments: int = 0
    """Snapshots of only the rows written since the one before, between two of all rows."""

    def __post_init__(self) -> None:
        for name, least in {"steps": 1, "keep": 1, "increments": 0}.items():
            if getattr(self, name) < least:
                raise ConfigError(f"snapshots.{name} is {getattr(self, name)}; it must be at least {least}")
        if self.minutes is not None and not self.minutes > 0:
            raise ConfigError(f"snapshots.minutes is {self.minutes}; it must be > 0")


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """Options of a run: its job, place and snapshots; its recipe says how it trains."""

    job: str
    """A key of :data:`geartrain.workers.jobs.JOBS`."""
    out: Path
    """Run folder."""
    recipe: Any
    """Recipe, of the job's class."""
    stated: tuple[str, ...] = ()
    """Dotted keys of the recipe that the person gave: a resumed run has the same values, unless they may change."""
    own_backbone: str | None = None
    """Backbone named on the command line; only then is user code imported."""
    data: str | None = None
    """Training data; None: that of the resumed run."""
    cache: Path = CACHE
    """Folder of downloads."""
    resume: bool = False
    """Resume the run in ``out``: to the end of its stage, or if that was reached, through another one."""
    resume_steps: int | None = None
    """Steps of that other stage; as many as before by default."""
    continues: bool = False
    """Resume the run in ``out`` or in ``snapshots`` to the end of its stage; start it if there is none."""
    allow_fallback: bool = False
    """When resuming, take the newest sound snapshot if the newest one is damaged."""
    joins: bool = False
    """Share the samples of the run in ``out`` with the worker that started it, which takes the snapshots."""
    overwrite: bool = False
    """Start over if ``out`` holds a run already."""
    snapshots: str | None = None
    """Folder or URL for the snapshots, which the shards see as this process does; ``out``/snapshots by default."""
    scheduler: str | None = None
    """host:port of a cluster's scheduler; by default that of the resumed run, or one shard is embedded in this process
    ("none": embedded even if the run had its rows in a cluster)."""
    graph: str | None = None
    """host:port of the cluster's graph service; by default a head that selects by a graph builds it here."""
    max_recoveries: int = 10
    """Most returns of the job to its last snapshot after lost shards."""
    sweep: bool = False
    """Whether a new classifier finds its learning rate by short trials, instead of using the recipe's."""
    device: str = "auto"
    metrics: str | None = None
    """host:port of the first rank's Prometheus metrics; None: no metrics."""
    loggers: tuple[str, ...] = ("tensorboard",)
    """Loggers of the job's numbers, from :mod:`geartrain.workers.loggers`."""

    def __post_init__(self) -> None:
        require_loggers(self.loggers)

    @property
    def snapshot_root(self) -> str:
        """Place of a new run's snapshots."""
        return self.snapshots or str(self.out / "snapshots")

    def continue_command(self, launcher: str = "") -> str:
        """Return the command that resumes the run; ``launcher`` is that of the ranks."""
        flags = {
            "cache": None if self.cache == CACHE else quote(str(self.cache)),
            "scheduler": self.scheduler,
            "graph": self.graph,
            "set": f"backbone={self.own_backbone}" if ":" in (self.own_backbone or "") else None,
        }
        given = "".join(f" --{name} {value}" for name, value in flags.items() if value)
        return f"{launcher}geartrain worker {self.job} --resume {self.out}{given}"


@dataclass(frozen=True)
class JobResult:
    """Outcome of a job."""

    finished: bool
    """False: a signal stopped it."""
    report: dict[str, Any] | None
    step: int
