"""Glyphs of 40,992 classes classified by one service, and by one that queries three services of a third each.

The answers to all pictures must be the same, or the bench ends. Both are asked in turns, each at half of the greatest
rate of the parts; all processes and who asks share the cores, so that what is seen is the price of asking others: on
hosts of their own the parts search side by side.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _common import result
from serve import CLASSES, CLASSIFY, asked, draw_letters, make_model, served

from geartrain.launch.bench import Result

NEEDS = ("onnx", "onnxruntime", "onnxscript", "starlette", "uvicorn")
PARTS = 3


def results(full: bool = False) -> Iterator[Result]:
    """Yield the cases of ``geartrain bench serve_parts``; ``full`` takes five times as many turns."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
        pictures = draw_letters(Path(folder))
        _, exported = make_model(Path(folder))
        one = running.enter_context(served(exported))
        follow = f"--follow=glyphs={exported}"
        parts = [running.enter_context(served(follow, f"--part={number}/{PARTS}")) for number in range(1, PARTS + 1)]
        divided = running.enter_context(served(follow, f"--parts={','.join(parts)}"))
        _wait_until_ready(divided)
        for picture in pictures:
            if (there := _answer(divided, picture)) != (here := _answer(one, picture)):
                raise RuntimeError(f"{picture.name}: parts answer {there}, and one index {here}")
        rate = asked(divided, CLASSIFY, pictures, seconds=3.0)["rate"] / 2
        times: dict[str, list[dict[str, float]]] = {one: [], divided: []}
        for _ in range(15 if full else 3):
            for address, told in times.items():
                told.append(asked(address, CLASSIFY, pictures, seconds=4.0, rate=rate))
        for name, share in {"p99": "99 of 100", "p50": "half"}.items():
            ours, theirs = (1000 * statistics.median(told[name] for told in times[at]) for at in (divided, one))
            case = f"{share} of {rate:.0f} answers a second from {PARTS} parts of {CLASSES:,} classes, all as one index"
            yield result(case, ours, "one index", theirs, "ms")


def _wait_until_ready(address: str) -> None:
    until = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(f"http://{address}/readyz", timeout=5).close()
            return
        except urllib.error.HTTPError:
            if time.monotonic() > until:
                raise
        time.sleep(0.1)


def _answer(address: str, picture: Path) -> Any:
    with urllib.request.urlopen(f"http://{address}{CLASSIFY}", picture.read_bytes(), timeout=20) as answer:
        return json.load(answer)["answers"]
