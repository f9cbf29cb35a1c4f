"""What a training asks of a logger, and how several are one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol


class RunLogger(Protocol):
    """Takes the numbers of one run, step by step.

    It is opened for a run that stands at a step: what it was given for that step and those before it is there already,
    and what a process that died gave it for later ones is given again, to the same values. So every step is there once.
    """

    def scalars(self, group: str, values: Mapping[str, float], step: int) -> None:
        """Log ``group/name`` for every value."""

    def flush(self) -> None:
        """Put what is pending where a kill does not reach it: a snapshot of the run is about to be taken."""

    def close(self) -> None:
        """The process ends, well or not."""


class Loggers:
    """Several loggers as one; none of them is a logger, too."""

    def __init__(self, loggers: Sequence[RunLogger] = ()) -> None:
        self._loggers = list(loggers)

    def scalars(self, group: str, values: Mapping[str, float], step: int) -> None:
        for logger in self._loggers:
            logger.scalars(group, values, step)

    def flush(self) -> None:
        for logger in self._loggers:
            logger.flush()

    def close(self) -> None:
        for logger in self._loggers:
            logger.close()
