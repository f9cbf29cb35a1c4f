"""What a step may take: counted, so that it can be asserted where no GPU is."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest

from tests.recorder.guard import why_not
from tests.recorder.record import recorded
from tests.recorder.report import Report


class Budget(NamedTuple):
    """The most launches and host waits of a step; a step may never mix devices."""

    launches: int
    waits: int
    step: str
    options: dict[str, Any] = {}  # noqa: RUF012 (read only)

    def require(self, report: Report) -> None:
        """Fail, with the report, if the step took more."""
        within = report.launches <= self.launches and report.num_waits <= self.waits
        assert not report.failure and not report.mixtures and within, f"{self}\n{report.text()}"


_BUDGETS: list[Budget] = []
"""Of all modules that were collected."""


@functools.cache
def _reports() -> list[Report]:
    """One process records all, which saves its start and what is warmed up once."""
    return recorded([(budget.step, budget.options) for budget in _BUDGETS])


def reports_of(budgets: Sequence[Budget]) -> Callable[[], list[Report]]:
    """A fixture for a module: the reports of its budgets."""
    first = len(_BUDGETS)
    _BUDGETS.extend(budgets)

    @pytest.fixture(scope="module")
    def reports() -> list[Report]:
        if reason := why_not():
            pytest.skip(reason)
        return _reports()[first : first + len(budgets)]

    return reports
