"""The command line in this process: what a command says, without the start of a process."""

from __future__ import annotations

import io
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout

import pytest
from click.testing import Result
from typer.testing import CliRunner

from geartrain.cli import main as cli


def typed(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Type ``geartrain`` with these arguments."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["geartrain", *arguments])
        patch.delenv("COLUMNS", raising=False)  # readline adds it to pytest's
        try:
            cli.main()
        except SystemExit as exited:
            code = exited.code if isinstance(exited.code, int) else int(exited.code is not None)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def invoke(*arguments: str, answer: str | None = None) -> Result:
    """The same, but that an error is raised as it is; ``answer`` is typed where it asks."""
    result = CliRunner().invoke(cli.build_app([*arguments]), [*arguments], input=answer)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result
