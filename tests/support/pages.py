"""The code blocks of documentation pages, and how tests run them.

A ``diff`` block is two programs: what a reader has, and what it becomes.
"""

from __future__ import annotations

import contextlib
import io
import re
import time
from dataclasses import dataclass
from pathlib import Path

import torch

DEADLINE_SECONDS = 90
DOCS = Path(__file__).resolve().parents[2] / "docs"
_FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```', flags=re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A piece of code of a page."""

    language: str
    title: str
    code: str

    @property
    def before(self) -> str:
        """The program that a diff begins with."""
        return self._side("-")

    @property
    def after(self) -> str:
        """The program that a diff ends with."""
        return self._side("+")

    def _side(self, sign: str) -> str:
        return "\n".join(line[1:] for line in self.code.splitlines() if line[:1] in (sign, " ", "")) + "\n"


def blocks_of(page: str) -> list[Block]:
    """The blocks of a page, by its path below ``docs``."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return [Block(language, title or "", code) for language, title, code in _FENCE.findall(text)]


def program_of(page: str) -> str:
    """The ``python`` blocks without a title, which are a single program."""
    return "\n".join(block.code for block in blocks_of(page) if block.language == "python" and not block.title)


def run(code: str, folder: Path) -> str:
    """Run a program in this process, with ``folder`` as the current one; return what it prints.

    A process of its own would take seconds to import torch. The random numbers of the caller stay as they are.
    """
    printed = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(printed), torch.random.fork_rng(devices=[]):
        exec(compile(code, "page", "exec"), {"__name__": "__main__"})
    return printed.getvalue()


def losses_in(printed: str) -> list[float]:
    """The numbers that follow the word loss."""
    return [float(found) for found in re.findall(r"loss (\d+\.\d+)", printed)]


def await_text(shown: Path, pattern: str) -> re.Match[str]:
    """Wait until a process has printed what fits the pattern to this file."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    text = ""
    while time.monotonic() < deadline:
        if shown.exists() and (found := re.search(pattern, text := shown.read_text(encoding="utf-8"))):
            return found
        time.sleep(0.05)
    raise AssertionError(f"{pattern!r} is not in what was printed:\n{text}")
