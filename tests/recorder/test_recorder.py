"""The recorder counts what it should, and says where."""

from __future__ import annotations

import pytest

from tests.recorder.budgets import Budget, reports_of
from tests.recorder.report import Report

pytestmark = pytest.mark.timeout(600)  # the first that asks waits for all recordings
WHAT = ["plain", "waiting", "patient", "mixed", "nothing"]
reports = reports_of([Budget(0, 0, "probe", {"what": what}) for what in WHAT])


@pytest.fixture
def probed(reports: list[Report]) -> dict[str, Report]:
    return dict(zip(WHAT, reports, strict=True))


def test_launches_bytes_and_flops_are_counted(probed: dict[str, Report]) -> None:
    plain = probed["plain"]
    assert (plain.launches, plain.num_waits, plain.failure) == (3, 0, "")
    assert plain.kernels == {"twice": 1}
    assert plain.operations == {"mm": 1, "relu_": 1}
    assert plain.flops == 2 * 64 * 64 * 32 + 2000
    assert plain.bytes == 4 * (2 * 64 * 32 + 64 * 64) + 4 * 64 * 64 + 1000


def test_waits_are_counted_where_the_host_waits(probed: dict[str, Report]) -> None:
    waiting = probed["waiting"]
    assert waiting.num_waits == 6, waiting.text()
    patient = probed["patient"]
    assert patient.num_waits == 1, patient.text()
    (place,) = patient.waits
    assert place.startswith("event.synchronize @ bridge/rows/transfers.py:")


def test_mixtures_of_devices_are_named(probed: dict[str, Report]) -> None:
    assert [name.split(" @ ")[0] for name in probed["mixed"].mixtures] == ["aten.add.Tensor"]
    assert probed["mixed"].launches == 2


def test_a_step_that_fails_says_so(probed: dict[str, Report]) -> None:
    assert "KeyError: 'nothing'" in probed["nothing"].failure
