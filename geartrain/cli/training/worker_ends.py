"""How a command of ``geartrain worker`` begins and ends: what it refuses, where it speaks, how it exits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from geartrain.ams.values.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from geartrain.workers.job.options import JobResult

STOPPED, INTERRUPTED = 3, 130
"""Exit codes of a training that a signal ended: saved, and with nothing saved."""


def refuse_with_resume(resume: Path | None, **given: object) -> None:
    """A resumed run goes on with its own settings."""
    flags = {"neighbours": "--k"}
    names = [flags.get(name, f"--{name.replace('_', '-')}") for name, value in given.items() if value is not None]
    if resume is not None and names:
        raise ConfigError(
            f"{', '.join(names)} cannot change for the run that --resume {resume} goes on with; leave it out, or start "
            "a new run (another --out, without --resume)"
        )


def refuse_contradictions(resume: Path | None, *, continues: bool, overwrite: bool, allow_fallback: bool) -> None:
    """A run either goes on or begins."""
    if continues and (resume is not None or overwrite):
        other = "--overwrite" if overwrite else "--resume"
        raise ConfigError(f"--continue goes on with a run or begins it, {other} does one of both; give one of the two")
    if resume is not None and overwrite:
        raise ConfigError(f"--overwrite would replace the run that --resume {resume} goes on with; give one of the two")
    if allow_fallback and resume is None and not continues:
        raise ConfigError(
            "--allow-fallback chooses among the snapshots of a run; give it with --resume RUN or --continue"
        )


def loggers_of(names: list[str] | None) -> tuple[str, ...]:
    """The loggers that ``--logger`` names: TensorBoard unless said, none for ``none``."""
    if names is None:
        return ("tensorboard",)
    return () if names == ["none"] else tuple(names)


def console_of(as_json: bool) -> Console:
    """Where a worker speaks: stderr, where stdout is for JSON."""
    from rich.console import Console

    return Console(stderr=as_json)


def end(result: JobResult, as_json: bool) -> None:
    """Print the report, and exit as the job ended."""
    if as_json and result.report is not None:
        print(json.dumps(result.report))
    if not result.finished:
        raise typer.Exit(STOPPED if result.is_saved else INTERRUPTED)
