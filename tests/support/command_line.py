"""The command line in this process: what a command says, without the start of a process."""

from __future__ import annotations

import io
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout

import pytest

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
