"""Records steps in a process of their own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any

from tests.recorder.report import REPOSITORY, Report

Case = tuple[str, dict[str, Any]]
"""A function of ``tests/recorder/steps``, and what it is called with."""


def recorded(cases: Sequence[Case]) -> list[Report]:
    """A report of each case, in order; one that failed says so in :attr:`Report.failure`."""
    command = [sys.executable, "-m", "tests.recorder", "--json", json.dumps(list(cases))]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"title"')]
    if len(lines) != len(cases):
        raise RuntimeError(f"the recorder ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return [Report.from_json(line) for line in lines]


def record_here(case: Case, report: Report, pinned: Any, repeats: int = 3) -> None:
    """Record the last of ``repeats`` steps in this process, in which a fake device was installed."""
    from tests.recorder.fake_device import recording
    from tests.recorder.steps import STEPS

    name, options = case
    report.integers = 1
    report.title = " ".join([name, *(f"{key}={value}" for key, value in options.items())])
    report.reset()
    begun = time.monotonic()
    with recording(report, pinned):
        try:
            with STEPS[name](report=report, **options) as step:
                for _ in range(repeats):
                    step()
        except Exception:
            report.failure = "".join(traceback.format_exc().splitlines(keepends=True)[-16:])
    print(f"recorded {report.title} in {time.monotonic() - begun:.1f} s", file=sys.stderr)
