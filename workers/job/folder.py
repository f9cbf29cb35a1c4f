"""Run folders: the record of a training run, its lock, and room for the next run.

run.json       identity of the job, place of its snapshots, its launcher
recipe.yaml    every key of its recipe; --recipe takes it
snapshots/     snapshots to resume from, unless they are elsewhere
model/         see :mod:`geartrain.workers.models.saved_model`
events/        TensorBoard; wandb/ and mlruns/ are of the loggers of that name
sweep.json     trials of learning rates, if there were any
report.json    of a finished run
mistakes.png   of a finished run
calibration.png  of a finished run that predicts clicks
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from geartrain.ams.storage.snapshot.folder import list_snapshots
from geartrain.ams.storage.snapshot.store import place
from geartrain.ams.values.errors import ConfigError, GeartrainError, RunHeld, SnapshotDamaged
from geartrain.workers.atomic import previous_folder, sole_user, write_json
from geartrain.workers.job.keys import RECIPE_FILE

_FOLDERS = ("model", "events", "wandb", "mlruns", "snapshots")
_RUN = "run.json"
HERE = "none"
"""Value in place of a scheduler's address: the worker has the rows."""
PICTURES = ("mistakes.png", "calibration.png")
"""Pictures of a run's report."""
_FILES = (_RUN, RECIPE_FILE, "sweep.json", "report.json", *PICTURES)


@dataclass(frozen=True, kw_only=True)
class Run:
    """Content of ``run.json``."""

    job: str
    """Name of the job's table, unique to it."""
    snapshots: str
    """Absolute folder, or URL."""
    launch: str | None
    """Name of the launcher that started the run, if it can restart it."""
    began: float = 0.0
    """Unix time of its start."""
    stage_end: int = 0
    """Step at which its current or last stage ends."""
    ended: bool = True
    """Whether that stage was trained, evaluated and reported."""
    over: bool = False
    """Whether that stage was trained, so that workers which joined it end."""
    scheduler: str | None = None
    """host:port of the scheduler of the cluster that has its rows; None: the worker has them."""


def write_run(folder: Path, run: Run) -> None:
    """Write ``run.json``. Snapshots inside ``folder`` are found again if the folder is moved."""
    inside = Path(run.snapshots).is_relative_to(folder.absolute())
    snapshots = str(Path(run.snapshots).relative_to(folder.absolute())) if inside else run.snapshots
    write_json(folder / _RUN, asdict(run) | {"snapshots": snapshots})


def read_run(folder: Path) -> Run:
    """Return the run in ``folder``. Raises ConfigError if none can be read."""
    path = folder / _RUN
    try:
        run = Run(**json.loads(path.read_text(encoding="utf-8")))
        is_url = "://" in run.snapshots
        return run if is_url else replace(run, snapshots=str((folder / run.snapshots).absolute()))
    except FileNotFoundError as exc:
        raise ConfigError(
            f"{path} does not exist; is {folder} the folder of a run? One that ended before it began is started again "
            "with --overwrite"
        ) from exc
    except (OSError, ValueError, TypeError) as exc:
        raise ConfigError(f"{path} cannot be read: {exc}") from exc


def has_run(folder: Path) -> bool:
    """Return whether ``folder`` has a run, begun or ended."""
    return (folder / _RUN).exists()


def warn_if_unended(folder: Path, step: int | None, say: Callable[[str], None]) -> None:
    """Print the step of the model in ``folder``, a run or its folder "model", unless the run has ended.

    A run marked as ended without a snapshot of its end has not ended.
    """
    folder = folder.parent if folder.name == "model" and not has_run(folder) else folder
    if not has_run(folder):
        return
    run = read_run(folder)
    newest = next((entry.snapshot for entry in list_snapshots(run.snapshots) if entry.snapshot is not None), None)
    if run.ended and (newest is None or newest.manifest.step >= run.stage_end):
        return
    which = "a step that it does not say" if step is None else f"step {step}"
    job = None if newest is None else newest.manifest.job.get("job")
    go_on = f". Train it to its end with: geartrain worker {job} --resume {folder}" if job else ""
    say(f"{folder} has not ended: this is its model of {which}, and it is to end at step {run.stage_end}{go_on}")


def has_snapshot(run: Run) -> bool:
    """Return whether the run has snapshots, damaged ones included."""
    return bool(list_snapshots(run.snapshots))


def resume_hint(out: Path, snapshots: str | None = None, *, go_on: str) -> str | None:
    """Return a sentence that names the newest snapshot's step and the command to resume; None if ``out`` has none.

    ``snapshots``: the snapshot folder, needed if ``out`` was lost. Thread-safe. Does not import torch.
    """
    try:
        listed = list_snapshots(read_run(out).snapshots if has_run(out) else place(snapshots or out / "snapshots"))
    except (GeartrainError, OSError):
        return None
    newest = next((entry.snapshot for entry in listed if entry.snapshot is not None), None)
    return None if newest is None else f"saved is step {newest.manifest.step}. Go on with: {go_on}"


def require_new_run(folder: Path) -> None:
    """Raise ConfigError, with the remedies, if ``folder`` holds a finished or interrupted run or is no folder."""
    require_folder(folder, "--out")
    if not any((folder / name).exists() for name in (*_FOLDERS, *_FILES)):
        return
    can_go_on = has_run(folder) and has_snapshot(read_run(folder))
    go_on = f"go on with it (--resume {folder}), " if can_go_on else ""
    raise ConfigError(
        f"{folder} already holds a run{'' if can_go_on else ' that took no snapshot'}; "
        f"{go_on}give another --out, or replace it with --overwrite"
    )


def find_run(out: Path, snapshots: str | None, *, allow_fallback: bool) -> Run | None:
    """Return the run that ``--continue`` resumes; None: there is none yet, or it has saved nothing, and starts anew.

    It is that of ``out``. If that is missing, it is recreated from the newest snapshot in ``snapshots``
    (``out``/snapshots by default). Raises ConfigError if ``out`` has something else, or a run with other snapshots,
    SnapshotDamaged if no snapshot can be used.
    """
    require_folder(out, "--out")
    root = str(place(snapshots or out / "snapshots"))
    if has_run(out):
        run = read_run(out)
        if snapshots is not None and root != run.snapshots:
            raise ConfigError(f"the snapshots of the run in {out} are in {run.snapshots}, not in {root}; leave it out")
        return run if has_snapshot(run) else None
    listed = list_snapshots(root)
    if not listed:
        require_new_run(out)
        return None
    sound = [entry.snapshot for entry in (listed if allow_fallback else listed[:1]) if entry.snapshot is not None]
    if not sound:
        raise listed[0].damage or SnapshotDamaged(f"{listed[0].path} is damaged")
    newest = sound[0]
    saved: dict[str, Any] = newest.manifest.job
    if "progress" not in saved:
        raise ConfigError(f"{newest.path} was not taken by 'geartrain worker'; give another --snapshots")
    progress = saved["progress"]
    run = Run(
        job=progress["table"],
        snapshots=root,
        launch=None,
        stage_end=progress["stage_start"] + progress["stage_steps"],
        ended=False,
        scheduler=saved.get("scheduler"),
    )
    out.mkdir(parents=True, exist_ok=True)
    write_run(out, run)
    return run


def read_report(out: Path) -> dict[str, Any] | None:
    """Return the report of the run in ``out``, if it has ended."""
    try:
        report: dict[str, Any] = json.loads((out / "report.json").read_text(encoding="utf-8"))
        return report
    except (OSError, ValueError):
        return None


def cluster_of(given: str | None, run: Run | None, say: Callable[[str], None]) -> str | None:
    """Return the scheduler of the cluster for the rows of a run; None: they are in this process.

    ``given`` (an address, or :data:`HERE`) counts first; else the cluster that has the run's rows.
    """
    if given is None:
        return None if run is None else run.scheduler
    scheduler = None if given == HERE else given
    if run is not None and scheduler != run.scheduler:
        before, now = (f"the cluster of {where}" if where else "the worker" for where in (run.scheduler, scheduler))
        say(f"The rows of the run were in {before}; from now on they are in {now}")
    return scheduler


def require_new_snapshots(root: str) -> None:
    """Raise ConfigError if ``root`` has snapshots: those of another job are never resumed from, or removed."""
    if listed := list_snapshots(root):
        raise ConfigError(
            f"{root} already holds snapshots ({listed[0].name!r} is the newest); give another --snapshots, or move "
            "them away"
        )


def require_one_process(job: str) -> None:
    """Raise ConfigError if torchrun started several processes for a single-process job."""
    processes = os.environ.get("WORLD_SIZE", "1")
    if processes != "1":
        several = ", or, if they are to share its samples, give --set mode=async" if job == "ctr" else ""
        raise ConfigError(
            f"'geartrain worker {job}' trains in one process, and torchrun has started {processes}; start it without "
            f"torchrun, or with --nproc-per-node 1{several}"
        )


@contextmanager
def sole_trainer(folder: Path) -> Iterator[None]:
    """Lock the run folder against other processes of this machine, making it if needed. One that was made for it goes
    again if nothing came into it.

    Raises RunHeld if another process has the lock, ConfigError if the folder cannot be made.
    """
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    create_folder(folder, "run folder")
    with ExitStack() as held:
        try:
            held.enter_context(sole_user(folder))
        except BlockingIOError as exc:
            raise RunHeld(
                f"another process trains in {folder}, or was stopped in the middle of it; end that one first, or give "
                "another --out to begin a run"
            ) from exc
        held.callback(_remove_empty, missing)  # while it is locked
        yield


def create_folder(folder: Path, what: str) -> None:
    """Create a folder below --out. Raises ConfigError if it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(
            f"the {what} {folder} cannot be made ({exc.strerror or exc}); give an --out where you may write"
        ) from exc


def _remove_empty(folders: Sequence[Path]) -> None:
    with suppress(OSError):  # it holds something by now
        for folder in folders:
            folder.rmdir()


def require_folder(path: Path, flag: str) -> None:
    """Raise ConfigError if ``path``, given as ``flag``, is no folder and cannot become one: a file is in its way."""
    existing = next((place for place in (path, *path.parents) if place.exists()), None)
    if existing is not None and not existing.is_dir():
        raise ConfigError(f"{flag} is {path}, but {existing} is not a folder; give a folder, or one to be made")


def move_aside(folder: Path) -> Path | None:
    """Move the run in ``folder`` to the folder NAME.previous beside it, replacing one moved there before.

    A run that saved nothing replaces none: it is removed. Nothing of it is then taken for the next run's; other files
    stay. Returns that folder, None if no run was moved there.
    """
    aside = folder.with_name(f"{folder.name}.previous")
    parts = [*_FOLDERS, *(previous_folder(Path(name)).name for name in _FOLDERS), *_FILES]
    there = [name for name in parts if (folder / name).exists()]
    if not there:
        return None
    if aside.exists() and not _has_saved(folder):
        for part in (folder / name for name in there):
            part.unlink() if part.is_symlink() or not part.is_dir() else shutil.rmtree(part)
        return None
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    for name in there:
        (folder / name).rename(aside / name)
    return aside


def _has_saved(folder: Path) -> bool:
    """Return whether the run in ``folder`` has a snapshot, a model or a report, or may have one."""
    if any((folder / name).exists() for name in ("model", "report.json")) or not has_run(folder):
        return True
    try:
        return has_snapshot(read_run(folder))
    except (GeartrainError, OSError):
        return True
