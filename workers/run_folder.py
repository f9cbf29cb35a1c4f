"""Whether a folder holds a training run, and how one makes room for the next.

model/         see :mod:`geartrain.workers.checkpoint`
events/        TensorBoard
report.json    of a finished run
mistakes.png   of a finished run
"""

from __future__ import annotations

import shutil
from pathlib import Path

from geartrain.ams.errors import ConfigError
from geartrain.workers.atomic import complete_folder, previous_folder

_FOLDERS = ("model", "events")
_FILES = ("report.json", "mistakes.png")


def require_new_run(folder: Path) -> None:
    """Raise ConfigError, with the remedies, if ``folder`` holds a finished or interrupted run or is no folder."""
    require_folder(folder, "--out")
    has_model = complete_folder(folder / "model").exists()
    if not has_model and not any((folder / name).exists() for name in (*_FOLDERS, *_FILES)):
        return
    go_on = f"go on with it (--resume {folder}), " if has_model else ""
    raise ConfigError(
        f"{folder} already holds a run{'' if has_model else ' that saved no model'}; "
        f"{go_on}give another --out, or replace it with --overwrite"
    )


def require_folder(path: Path, flag: str) -> None:
    """Raise ConfigError if ``path``, given as ``flag``, is no folder and cannot be made one: a file is in its way."""
    existing = next((place for place in (path, *path.parents) if place.exists()), None)
    if existing is not None and not existing.is_dir():
        raise ConfigError(f"{flag} is {path}, but {existing} is not a folder; give a folder, or one to be made")


def put_aside(folder: Path) -> Path | None:
    """Move the run in ``folder`` to the folder NAME.previous beside it, in the place of one put aside before.

    No part of it is then taken for the next run's; other files stay. Returns that folder, None if there was no run.
    """
    aside = folder.with_name(f"{folder.name}.previous")
    parts = [*_FOLDERS, *(previous_folder(Path(name)).name for name in _FOLDERS), *_FILES]
    there = [name for name in parts if (folder / name).exists()]
    if not there:
        return None
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    for name in there:
        (folder / name).rename(aside / name)
    return aside
