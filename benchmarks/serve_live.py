"""A service that follows a training of 40,992 classes: effect of new versions on answers, and delay of a new class.

Every row and the whole network change with each version, so that an answer made of two versions shows; one that does,
or fails, ends the bench. Turns of 10 s with and without versions alternate, at half of the greatest rate; training,
service and who asks share the cores. A class is added to the training, and asked for until it is answered.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from _common import result
from _up import GEARTRAIN, started
from PIL import Image

from geartrain.launch.bench import Result

NEEDS = ("onnx", "onnxruntime", "onnxscript", "starlette", "uvicorn")
CLASSES = 40_992
HERE = Path(__file__).parent
TURN_SECONDS, EVERY_SECONDS = 10.0, 5.0
BUDGET_SECONDS = 5.0
PATIENCE_SECONDS = 120.0


def results(full: bool = False) -> Iterator[Result]:
    """Yield the cases of ``geartrain bench serve_live``; ``full`` also adds classes to a million."""
    with followed(CLASSES) as live:
        rate = len(live.ask(4.0, 0)["times"]) / 4.0 / 2
        calm: list[float] = []
        changing: list[float] = []
        versions = set[int]()
        for _ in range(6):
            calm += live.ask(TURN_SECONDS, rate)["times"]
            told = live.ask_while_it_changes(TURN_SECONDS, rate)
            changing += told["times"]
            versions |= set(told["versions"])
        before, during = (1000 * float(np.percentile(times, 99)) for times in (calm, changing))
        yield result(
            f"99 of 100 answers at {rate:.0f} a second, a version each {EVERY_SECONDS:g} s ({len(versions)} of them; "
            f"{len(changing):,} answers, none failed or mixed)",
            during,
            "without versions",
            before,
            "ms",
            target=0.5,
        )
        yield _until_asked(live, f"a class added in training, of {CLASSES:,}, until it is answered")
    if full:
        with followed(1_000_000) as live:
            yield _until_asked(live, "a class added in training, of 1,000,000, until it is answered")


def _until_asked(live: Live, case: str) -> Result:
    seconds = statistics.median(live.add_a_class() for _ in range(5))
    return result(case, seconds, "budget", BUDGET_SECONDS, "s", target=1.0)


class Live:
    """A training, who follows it, and who asks."""

    def __init__(self, training: subprocess.Popen[str], address: str, picture: Path) -> None:
        self.training, self.address, self.picture = training, address, picture
        self.version = 0

    def ask(self, seconds: float, rate: float) -> dict[str, Any]:
        """What a process that asks says. Raises RuntimeError if an answer was wrong."""
        arguments = [self.address, str(self.picture), str(seconds), str(rate)]
        command = [sys.executable, str(HERE / "_asking_versions.py"), *arguments]
        told: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        if told["num_wrong"]:
            raise RuntimeError(f"{told['num_wrong']} answers failed or were of two versions: {told['wrong']}")
        return told

    def ask_while_it_changes(self, seconds: float, rate: float) -> dict[str, Any]:
        """The same, with a version each 5 s."""
        ended = threading.Event()

        def turn() -> None:
            while not ended.is_set():
                self.tell("turn")
                ended.wait(EVERY_SECONDS)

        turning = threading.Thread(target=turn)
        turning.start()
        try:
            return self.ask(seconds, rate)
        finally:
            ended.set()
            turning.join()

    def add_a_class(self) -> float:
        """Seconds from when it began to be added until an answer names it."""
        began = self.tell("add")
        while self.facts()["facts"].get("classes", 0) < self.num_classes + 1:
            time.sleep(0.05)
        self.num_classes += 1
        return time.time() - began

    def tell(self, wish: str, **details: Any) -> float:
        """Have the training do it; return when it began."""
        self.version += 1
        assert self.training.stdin is not None and self.training.stdout is not None
        self.training.stdin.write(json.dumps({"do": wish, "version": self.version, **details}) + "\n")
        self.training.stdin.flush()
        return float(json.loads(self.training.stdout.readline())["began"])

    def facts(self) -> dict[str, Any]:
        """What the service says of its model."""
        import urllib.request

        with urllib.request.urlopen(f"http://{self.address}/v1/models/live", timeout=60) as answer:
            said: dict[str, Any] = json.loads(answer.read())
            return said

    def wait(self) -> None:
        """Until there is a version."""
        end = time.monotonic() + PATIENCE_SECONDS
        while self.facts()["current"] is None:
            if time.monotonic() > end:
                raise RuntimeError(f"no version after {PATIENCE_SECONDS:g} s: {self.facts()['following']}")
            time.sleep(0.1)
        self.num_classes = int(self.facts()["facts"]["classes"])


@contextlib.contextmanager
def followed(num_classes: int) -> Iterator[Live]:
    """A training of so many classes, and a service that follows it."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
        picture = Path(folder) / "picture.png"
        Image.fromarray(np.kron(np.eye(4, dtype=np.uint8) * 255, np.ones((8, 8), np.uint8))).save(picture)
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        training = subprocess.Popen([sys.executable, str(HERE / "_published.py"), str(num_classes)], **pipes)
        running.enter_context(training)
        running.callback(training.kill)
        follow = ["serve", "--follow", f"live={folder}/live", "--listen=127.0.0.1:0", "--log-level=warning"]
        _, facts = running.enter_context(started([*GEARTRAIN, *follow]))
        live = Live(training, facts["address"], picture)
        live.tell("begin", folder=f"{folder}/live")
        live.tell("turn")
        live.wait()
        yield live
