"""``python -m tests.recorder head classes=1_000_000 dtype=bfloat16 ...``: print what a step does on a GPU.

Steps are the functions of ``tests/recorder/steps``; their arguments are the options.
"""

from __future__ import annotations

import ast
import json
import sys
from typing import Any

from tests.recorder import guard


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def main(arguments: list[str]) -> int:
    """Record the cases: ``--json LIST`` for :func:`tests.recorder.record.recorded`, else one by words."""
    if reason := guard.why_not():
        print(reason, file=sys.stderr)
        return 1
    guard.load()
    from tests.recorder import fake_device
    from tests.recorder.record import Case, record_here
    from tests.recorder.report import Report
    from tests.recorder.steps import STEPS

    as_json = arguments[:1] == ["--json"]
    cases: list[Case] = []
    if as_json:
        cases = json.loads(arguments[1])
    for argument in [] if as_json else arguments:
        key, equals, text = argument.partition("=")
        if equals and cases:
            cases[-1][1][key] = _value(text)
        elif argument in STEPS:
            cases.append((argument, {}))
        else:
            print(f"{argument!r} is no step; there are {', '.join(STEPS)}", file=sys.stderr)
            return 2
    report = Report()
    pinned = fake_device.install(report)
    for case in cases or [(name, {}) for name in STEPS]:
        record_here(case, report, pinned)
        print(report.to_json() if as_json else report.text(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
