"""What a person sees while a worker trains: one live line."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

_SECONDS_BETWEEN_LINES = 10.0


class LiveLine:
    """The newest numbers of the training: redrawn in place on a terminal, a line every ten seconds elsewhere."""

    def __init__(self, console: Console, last_step: int) -> None:
        self._console = console
        self._last_step = last_step
        self._live = Live(console=console, refresh_per_second=8) if console.is_terminal else None
        self._printed = 0.0

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, step: int, numbers: dict[str, float]) -> None:
        """Show the numbers of ``step``: loss, epoch and samples_per_second, pull_ms and push_ms if they are known."""
        epoch = numbers["epoch"]
        line = (
            f"step {step:,}/{self._last_step:,}  epoch {epoch:.1f}/{epoch * self._last_step / step:.1f}  "
            f"loss {numbers['loss']:.3f}  {numbers['samples_per_second']:,.0f} samples/s"
        )
        if "pull_ms" in numbers:
            line += f"  pull {numbers['pull_ms']:.2f} ms  push {numbers['push_ms']:.2f} ms"
        now = time.monotonic()
        if self._live is not None:
            self._live.update(Text(line))
        elif now - self._printed >= _SECONDS_BETWEEN_LINES or step == self._last_step:
            self._console.print(line, highlight=False, soft_wrap=True)
            self._printed = now
