"""The command line of ``geartrain worker``: one list of options."""

from __future__ import annotations

import atexit
import io
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.main import get_command
from typer.testing import CliRunner

from geartrain.ams.observe import failpoints
from geartrain.cli.training.worker import app, train
from geartrain.workers import jobs
from geartrain.workers.job.interruption import Stopped
from geartrain.workers.job.options import JobOptions


@pytest.mark.parametrize("command", jobs.JOBS)
def test_every_option_shows_its_default(command: str) -> None:
    group: Any = get_command(app)
    silent = [
        option.name
        for option in group.commands[command].params
        if not option.is_flag and option.default is None and not isinstance(option.show_default, str)
    ]
    assert silent == []


def test_the_command_line_is_what_the_job_is_asked_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[JobOptions] = []

    def take(options: JobOptions, console: Console) -> object:
        given.append(options)
        console.print(f"{options.out}[/b] :100:")
        raise KeyboardInterrupt

    monkeypatch.setattr(jobs, "train", take)
    settings = ["--set", "select=knn", "--set", "sample_rate=0.2", "--set", "neighbours=7", "--rows", "hosted"]
    assert "runs/classify[/b] :100:\n" in CliRunner().invoke(app, ["classify", "--data", "pictures", *settings]).output
    CliRunner().invoke(app, ["glyphs", "--resume", "run", "--steps", "7"])
    classify, glyphs = given
    assert (classify.data, classify.sweep, str(classify.out)) == ("pictures", True, "runs/classify")
    recipe = classify.recipe
    assert (recipe.select, recipe.sample_rate, recipe.neighbours, recipe.rows) == ("knn", 0.2, 7, "hosted")
    assert set(classify.stated) == {"select", "sample_rate", "neighbours", "rows"}
    assert (glyphs.resume, glyphs.resume_steps, glyphs.stated) == (True, 7, ())


@pytest.mark.parametrize("as_json", [False, True])
def test_a_worker_tells_a_person_what_it_does_before_torch_is_loaded(
    as_json: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        isatty = lambda _: True  # noqa: E731

    def stop(_: str) -> None:
        raise Stopped

    out, err = Terminal(), Terminal()
    monkeypatch.setattr(failpoints, "reach", stop)
    monkeypatch.setattr(atexit, "register", lambda *_: None)  # it ends the process with the command's exit code
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    with pytest.raises(typer.Exit):
        train("ctr", cache=Path(), as_json=as_json)
    assert (err if as_json else out).getvalue().startswith("geartrain worker ctr: loads PyTorch, then ")
    assert "loads" not in (out if as_json else err).getvalue()
