"""Text on the terminal: names are printed as they are, and stdout may be closed or lack characters."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
from rich.text import Text

from geartrain.cli import main
from geartrain.cli.shared import consoles
from geartrain.cli.shared.consoles import plain_console, progress_bar, table_of
from tests.support.command_line import typed

NAMES = ["ctr/user[red]", "a[/b]", "10.0.0.1:100:"]
GEARTRAIN = [sys.executable, "-c", "from geartrain.cli.main import main; main()"]


def test_names_are_no_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    console = plain_console(force_terminal=True, width=80, file=(written := io.StringIO()))
    monkeypatch.setattr(consoles, "plain_console", lambda **_: console)
    console.print(table_of(("table", "state"), [(name, Text("up", "green")) for name in NAMES]))
    for name in NAMES:
        console.print(f"line {name}")
        with progress_bar(f"bar {name}"):
            pass
        text = Text.from_ansi(written.getvalue()).plain
        assert f" {name} " in text and f"line {name}" in text and f"bar {name}" in text


@pytest.mark.parametrize("stream", ["stdin", "stdout", "stderr"])
def test_a_closed_stream_stays_without_use(stream: str) -> None:
    """Its number must not be that of a file or connection opened later."""
    number = ["stdin", "stdout", "stderr"].index(stream)
    code = (
        "import os; from geartrain.cli import main; main._complete_streams(); "
        f"assert os.path.samestat(os.fstat({number}), os.stat(os.devnull))"
    )
    shell = ["sh", "-c", f'exec "$@" {number}{"<" if number == 0 else ">"}&-', "sh", sys.executable, "-c", code]
    assert subprocess.run(shell, check=False).returncode == 0


def test_a_character_that_the_encoding_of_stdout_lacks_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    told = subprocess.run([*GEARTRAIN, "snapshot", "create", "-h"], check=False, capture_output=True, text=True)
    assert told.returncode == 0 and "or -2 ? behind it" in told.stdout, told.stderr


def test_ctrl_c_while_a_command_is_imported_prints_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "build_app", interrupted)
    done = typed("status")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
