"""Console display of a training worker: a bar with the remaining time, and lines that stay."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

_SECONDS_BETWEEN_LINES = 10.0


class ProgressLine:
    """Newest numbers of the training: a line every ten seconds, and on a terminal a bar below it."""

    def __init__(self, console: Console, first_step: int, last_step: int, *, is_shown: bool = True) -> None:
        """``last_step`` 0: unknown."""
        self._console, self._is_shown = console, is_shown
        self._first_step, self._last_step = first_step, last_step
        left = TextColumn("left", style="progress.remaining")
        numbers = TextColumn("{task.description}")
        columns = (BarColumn(20), TaskProgressColumn(), TimeRemainingColumn(compact=True), left, numbers)
        is_barred = is_shown and console.is_terminal
        self._bar = Progress(*columns, console=console, transient=True, disable=not is_barred)
        self._task = self._bar.add_task("", total=last_step - first_step if last_step else None)
        self._printed = time.monotonic() if console.is_terminal else 0.0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show(self, step: int, numbers: dict[str, float]) -> None:
        """Show the numbers of ``step``: loss and epoch, and those of :class:`RecentSteps` that are known."""
        if not self._is_shown:
            return
        epoch, line = numbers["epoch"], f"step {step:,}"
        if self._last_step:
            line += f"/{self._last_step:,}  epoch {epoch:.1f}/{epoch * self._last_step / step:.1f}"
        line += f"  loss {numbers['loss']:.3f}"
        if "steps_per_second" in numbers:
            line += f"  {numbers['steps_per_second']:,.1f} steps/s"
        self._bar.update(self._task, completed=step - self._first_step, description=line)
        if "steps_per_second" in numbers:
            line += f"  {numbers['samples_per_second']:,.0f} samples/s"
            line += f"  pull {numbers['pull_ms']:.2f} ms  push {numbers['push_ms']:.2f} ms"
        now = time.monotonic()
        if now - self._printed >= _SECONDS_BETWEEN_LINES or step == self._last_step:
            self._console.print(line, highlight=False, soft_wrap=True)
            self._printed = now
