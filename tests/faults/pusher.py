"""A small job in a process of its own: pushes integers, logs what was acknowledged, takes snapshots, goes back.

``python -m tests.faults.pusher ADDRESS FOLDER SEED new|resume``. Each line of its log (FOLDER/log.jsonl, synced) and
of its output is one event as JSON:

    begin N, ack N         push N is sent, is acknowledged
    frozen NAME            a snapshot's moment has passed; told to wait, the job writes it after a line on stdin
    snapshot NAME, upto N  it is whole and holds pushes 1 … N
    failed NAME            it is not
    lost WHY               a shard came back empty; goes back after a line on stdin
    back N                 the rows are those of pushes 1 … N again; goes on after a line on stdin
    done
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.factory import connect
from geartrain.ams.client.table import Table
from geartrain.ams.storage.snapshot.folder import latest
from geartrain.ams.values.config import ClientConfig
from geartrain.ams.values.errors import ClusterNotReady, GeartrainError, ShardRestarted, ShardUnavailable, TableNotFound
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.specs import Constant, TableSpec

PUSHES = 40
AT_ONCE = 4
EVERY = 8
DIM = 8
WAIT_WHEN_FROZEN = "wait-when-frozen"
"""A file of this name in the job's folder tells it to wait."""
SPEC = TableSpec(name="sums", dim=DIM, optimizer=SGD(1.0), num_rows=512, initializer=Constant(0.0))
CONFIG = ClientConfig(
    attempt_timeout_seconds=2.0, recovery_timeout_seconds=60, connect_timeout_seconds=60, refused_timeout_seconds=60
)


def content(seed: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ids [N] and integer gradients [N, D] of push ``number``."""
    generator = np.random.default_rng([seed, number])
    assert SPEC.num_rows is not None
    ids = np.sort(generator.choice(SPEC.num_rows, int(generator.integers(20, 200)), replace=False))
    return ids, generator.integers(-3, 4, (len(ids), DIM)).astype(np.float32)


class Job:
    """The pushes from where the rows are to the last."""

    def __init__(self, address: str, folder: Path, seed: int) -> None:
        self._address, self._folder, self._seed = address, folder, seed
        self._log = (folder / "log.jsonl").open("a", encoding="utf-8")
        self._cluster: Cluster = connect(address, config=CONFIG)
        self._waits = (folder / WAIT_WHEN_FROZEN).exists()

    def run(self, *, resume: bool) -> None:
        if resume:
            number = self._go_back()
        else:
            self._cluster._scheduler.create_table(SPEC, reuse=False)
            number = 0
            self._snapshot(0)
        while number < PUSHES:
            try:
                number = self._push(range(number + 1, min(number + AT_ONCE, PUSHES) + 1))
                if number % EVERY == 0:
                    self._snapshot(number)
            except (ShardRestarted, ShardUnavailable, TableNotFound) as exc:
                self._tell(lost=type(exc).__name__, why=str(exc))
                self._await_word()
                number = self._go_back()
        self._tell(done=True)
        self._cluster.close()

    def _push(self, numbers: range) -> int:
        table = Table(SPEC, self._cluster._calls, self._cluster._stream)
        under_way = []
        for number in numbers:
            self._tell(begin=number)
            under_way.append((number, table.push_async(*content(self._seed, number))))
        errors = []
        for number, future in under_way:
            error = future.exception()
            if error is None:
                self._tell(ack=number)
            else:
                errors.append(error)
        if errors:
            raise errors[0]
        return numbers[-1]

    def _snapshot(self, number: int) -> None:
        name = f"step-{number:06}"
        try:
            if self._waits:
                self._hold_writing()
            pending = self._cluster.snapshot(self._folder / "snapshots", name, step=number)
            self._tell(frozen=name)
            if self._waits:
                self._await_word()
                self._let_write()
            pending.result(60)
        except ShardRestarted:
            self._tell(failed=name)
            raise
        except GeartrainError as exc:
            self._tell(failed=name, why=str(exc))
        else:
            self._tell(snapshot=name, upto=number)

    def _hold_writing(self) -> None:
        """Leave the moment between freeze and write open for as long as whoever kills needs."""
        calls = self._cluster._calls
        held: list[Any] = []
        whole = type(calls).background

        def hold(*arguments: Any) -> Any:
            go = threading.Event()
            held.append(go)
            return whole(calls, lambda: (go.wait(60), arguments[0](*arguments[1:]))[1])

        calls.background = hold  # type: ignore[method-assign]
        self._held = held

    def _let_write(self) -> None:
        del self._cluster._calls.background
        for go in self._held:
            go.set()

    def _go_back(self) -> int:
        while True:
            try:
                self._cluster.close()
                self._cluster = connect(self._address, config=CONFIG)
                self._cluster.drop_table(SPEC.name)
                snapshot = self._cluster.restore(latest(self._folder / "snapshots").path)
                break
            except (ClusterNotReady, ShardUnavailable, ShardRestarted):
                continue  # a role is on its way back
        self._tell(back=snapshot.manifest.step)
        self._await_word()
        return snapshot.manifest.step

    def _tell(self, **event: Any) -> None:
        line = json.dumps(event)
        self._log.write(line + "\n")
        self._log.flush()
        os.fsync(self._log.fileno())
        print(line, flush=True)

    @staticmethod
    def _await_word() -> None:
        if not sys.stdin.readline():
            raise SystemExit(1)


if __name__ == "__main__":
    Job(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])).run(resume=sys.argv[4] == "resume")
