"""A client that is interrupted again and again, and goes on each time: ADDRESS CONFIG SEED.

Round r takes 1 off column r of every row, so that each push can be told from the others. The last interrupt is not
caught.
"""

from __future__ import annotations

import os
import queue
import random
import signal
import sys
import threading
import time

import numpy as np

import geartrain as gt

NUM_ROWS, ROUNDS = 6_000, 40
LONGEST_SECONDS = 0.02


class Interrupts:
    """Ctrl-C, when asked for, a little later."""

    def __init__(self, seed: int) -> None:
        self._plan = random.Random(seed)
        self._asked: queue.SimpleQueue[float] = queue.SimpleQueue()
        self._sent: queue.SimpleQueue[None] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def ask(self) -> None:
        self._asked.put(self._plan.uniform(0, LONGEST_SECONDS))

    def await_it(self) -> None:
        self._sent.get()

    def _work(self) -> None:
        while True:
            time.sleep(self._asked.get())  # when is what the seed says, not what a test waits for
            os.kill(os.getpid(), signal.SIGINT)
            self._sent.put(None)


def main() -> None:
    """Work until an interrupt ends it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    address, config, seed = sys.argv[1], gt.ClientConfig.model_validate_json(sys.argv[2]), int(sys.argv[3])
    interrupts = Interrupts(seed)
    ids = np.arange(NUM_ROWS)
    out = np.empty((NUM_ROWS, ROUNDS), np.float32)
    acknowledged: set[int] = set()
    with gt.connect(address, config=config) as cluster:
        table = cluster.create_table("t", dim=ROUNDS, optimizer=gt.SGD(1.0), initializer=gt.Constant(0))
        for round_ in range(ROUNDS):
            gradients = np.zeros((NUM_ROWS, ROUNDS), np.float32)
            gradients[:, round_] = 1
            interrupts.ask()
            try:
                table.push(ids, gradients)
                acknowledged.add(round_)
                while True:
                    table.pull_into(ids, out)
            except KeyboardInterrupt:
                gradients[:], out[:] = 1000, 777
            interrupts.await_it()
        rows = table.pull(ids)
        applied = [set(np.unique(rows[:, round_]).tolist()) for round_ in range(ROUNDS)]
        lost = [round_ for round_ in acknowledged if applied[round_] != {-1.0}]
        wrong = [values for values in applied if not values <= {0.0, -1.0}]
        print(f"lost {lost} wrong {wrong} late {int((out != 777).sum())} acknowledged {len(acknowledged)}", flush=True)
        interrupts.ask()
        while True:
            table.push(ids, np.zeros((NUM_ROWS, ROUNDS), np.float32))
            table.pull_into(ids, out)


main()
