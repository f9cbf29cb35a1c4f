"""Training to follow, seen from outside: its newest snapshot, and its own progress.

It is given by the folder of a run, the folder or URL of its snapshots, or a scheduler with its job. A folder of
exported models can be followed, too: each is a moment of a training.
"""

from __future__ import annotations

import itertools
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from geartrain.ams.rpc.carrier import AttemptFailed
from geartrain.ams.rpc.client.dial import dial
from geartrain.ams.storage.snapshot.folder import Snapshot, list_snapshots
from geartrain.ams.storage.snapshot.store import parent_of, parse_place, place
from geartrain.ams.values.config import ClientConfig
from geartrain.ams.values.errors import ConfigError, GeartrainError
from geartrain.ams.values.scheduler_messages import DescribeJobs, JobEntry, ReadEvents
from geartrain.serving.folder import kind_of, version_folders
from geartrain.workers.job.folder import has_run, read_run
from geartrain.workers.models.saved_model import CONFIG, numbered_versions, read_config

logger = logging.getLogger(__name__)

_ANSWER_SECONDS = 5.0
_SCHEDULER = re.compile(r"(?P<address>[^/\s]+:\d{1,5})(?:/(?P<job>.+))?")


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Progress of a training as it reports it."""

    step: int
    state: str


@dataclass(frozen=True, kw_only=True)
class ExportedModel:
    """An exported version. Its files are checked when it is used."""

    folder: Path
    version: int
    step: int
    """Step of the training; its version number if the model has no step."""
    moment_id: str


class Training(ABC):
    """Source of snapshots. Used from one thread."""

    @property
    @abstractmethod
    def where(self) -> str:
        """Place of the snapshots, for people."""

    @abstractmethod
    def newest(self) -> Snapshot | ExportedModel | None:
        """Return the newest snapshot with a valid manifest; None: there is none yet.

        Raises GeartrainError, OSError: it cannot be read now.
        """

    @abstractmethod
    def older(self) -> Iterable[Snapshot | ExportedModel]:
        """Return the snapshots before the newest, newest first, for a service with no version whose newest is damaged.

        Raises as :meth:`newest`.
        """

    def progress(self) -> Progress | None:
        """Return the reported progress; None: only the snapshots tell."""
        return None


class SnapshotFolder(Training):
    """Snapshots in a folder or at a URL."""

    def __init__(self, root: str | Path) -> None:
        """Raise InvalidArgument for a URL that cannot be opened."""
        self.root = place(root)
        self._damaged: set[str] = set()

    @property
    def where(self) -> str:
        return str(self.root)

    def newest(self) -> Snapshot | None:
        """Return the newest sound snapshot. Each damaged one is logged once."""
        for listed in list_snapshots(str(self.root)):
            if listed.snapshot is not None:
                return listed.snapshot
            if listed.name not in self._damaged:
                self._damaged.add(listed.name)
                logger.warning("skipping a damaged snapshot: %s", listed.damage)
        return None

    def older(self) -> Iterator[Snapshot]:
        whole = (listed.snapshot for listed in list_snapshots(str(self.root)) if listed.snapshot is not None)
        return itertools.islice(whole, 1, None)


class TrainingFolder(Training):
    """The folder of a run of ``geartrain worker``, of snapshots, or of exported models. It may appear later."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._snapshots = SnapshotFolder(folder)

    def newest(self) -> Snapshot | ExportedModel | None:
        """Return the newest snapshot or model. A run that replaces this one is followed from then on."""
        if exported := self._exported():
            return _exported(exported[0])
        root = read_run(self._folder).snapshots if has_run(self._folder) else str(place(self._folder))
        if str(self._snapshots.root) != root:
            self._snapshots = SnapshotFolder(root)
        return self._snapshots.newest()

    def older(self) -> Iterator[Snapshot | ExportedModel]:
        for folder in (exported := self._exported())[1:]:
            with suppress(GeartrainError):
                yield _exported(folder)
        if not exported:
            yield from self._snapshots.older()

    @property
    def where(self) -> str:
        return f"{self._folder}{'' if self._folder.exists() else ', which does not exist'}"

    def _exported(self) -> list[Path]:
        is_one = not has_run(self._folder) and ((self._folder / CONFIG).exists() or numbered_versions(self._folder))
        return version_folders(self._folder) if is_one else []


def _exported(folder: Path) -> ExportedModel:
    config = read_config(folder)
    kind_of(folder, config)
    version = int(config["version"])
    step = int(config.get("training", {}).get("step") or version)
    moment = f"{version}@{config.get('created')}"
    return ExportedModel(folder=folder, version=version, step=step, moment_id=moment)


class ClusterJob(Training):
    """A job that a scheduler knows; its events name the place of its snapshots."""

    def __init__(self, address: str, job: str | None, config: ClientConfig | None = None) -> None:
        """``job`` None: the only one that took snapshots."""
        self._address, self._wanted = address, job
        self._config = config or ClientConfig()
        self._since = 0
        self._roots: dict[str, str] = {}
        """Place of each job's last snapshot."""
        self._snapshots: SnapshotFolder | None = None

    def newest(self) -> Snapshot | None:
        """Return the newest snapshot. While the scheduler is away, its last answer holds."""
        try:
            self._read_events()
        except (AttemptFailed, GeartrainError) as exc:
            if self._snapshots is None:
                raise exc if isinstance(exc, GeartrainError) else ConfigError(str(exc)) from exc
        job = self._job()
        if job is None:
            return None
        if self._snapshots is None or str(self._snapshots.root) != self._roots[job]:
            self._snapshots = SnapshotFolder(self._roots[job])
        return self._snapshots.newest()

    def older(self) -> Iterable[Snapshot]:
        return () if self._snapshots is None else self._snapshots.older()

    @property
    def where(self) -> str:
        return f"what the scheduler at {self._address} knows" + (f" of {self._wanted}" if self._wanted else "")

    def progress(self) -> Progress | None:
        try:
            jobs: tuple[JobEntry, ...] = self._call(DescribeJobs())
        except (AttemptFailed, GeartrainError):
            return None
        found = [job for job in jobs if job.job == self._job()]
        return Progress(step=found[0].report.step, state=found[0].report.state) if found else None

    def _job(self) -> str | None:
        if self._wanted is not None:
            return self._wanted if self._wanted in self._roots else None
        if len(self._roots) > 1:
            names = ", ".join(sorted(name or "(without a name)" for name in self._roots))
            raise ConfigError(
                f"the cluster at {self._address} has snapshots of {names}; say which: --follow {self._address}/JOB"
            )
        return next(iter(self._roots), None)

    def _read_events(self) -> None:
        while True:
            page = self._call(ReadEvents(since=self._since))
            if page.last < self._since:
                self._since = 0  # the scheduler was restarted without its data
                continue
            for event in page.events:
                if event.kind == "snapshot" and event.snapshot:
                    self._roots[event.job] = str(parent_of(parse_place(event.snapshot)))
            if not page.events:
                return
            self._since = page.events[-1].number

    def _call(self, request: DescribeJobs | ReadEvents):  # type: ignore[no-untyped-def]
        scheduler, _ = dial(self._address, self._config, once=True)
        try:
            return scheduler.call(request, _ANSWER_SECONDS)
        finally:
            scheduler.close()


def training_of(said: str, config: ClientConfig | None = None) -> Training:
    """Return the training that a person names: the folder of a run, a folder or URL of snapshots, or HOST:PORT[/JOB] of
    a scheduler. Raises InvalidArgument for a URL that cannot be opened.
    """
    if "://" in said:
        return SnapshotFolder(said)
    match = None if Path(said).exists() else _SCHEDULER.fullmatch(said)
    return TrainingFolder(Path(said)) if match is None else ClusterJob(match["address"], match["job"], config)
