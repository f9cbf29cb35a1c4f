"""Interface of a logger, and several loggers as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol


class RunLogger(Protocol):
    """Logger of the numbers of one run, step by step.

    It is opened for a run at a step: earlier values, that step included, are logged already; values of later steps from
    a process that died are logged again, with the same values. So every step is there once.
    """

    def scalars(self, group: str, values: Mapping[str, float], step: int) -> None:
        """Log ``group/name`` for every value."""

    def flush(self) -> None:
        """Make pending values durable: a snapshot of the run is about to be taken."""

    def close(self) -> None:
        """Close: the process ends, well or not."""


class Loggers:
    """Several loggers as one; an empty list is a logger, too."""

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
