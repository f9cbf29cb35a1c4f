"""A day of stream in two minutes (ten with ``--full``): a job that learns from a topic, and a service that follows it.

Users and items come and go, clicks come up to 20 minutes after their impressions, rows are admitted and expire. At the
end the job's model and that of a batch training on the same samples score what comes next. Real processes; the broker
is the mock one of librdkafka. Each ratio is of the asked limit: 1 and more holds.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import re
import signal
import statistics
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import confluent_kafka as kafka
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from _common import result
from _up import GEARTRAIN, running_cluster, started

import geartrain as gt
from geartrain.ams.storage.snapshot.folder import list_snapshots
from geartrain.ams.values.errors import GeartrainError
from geartrain.launch.bench import Result
from geartrain.workers.ctr.metrics import auc
from geartrain.workers.samples.kafka.messages import place_of

NEEDS = ("onnx", "onnxruntime", "onnxscript", "starlette", "uvicorn")
A_SECOND = 800
"""Impressions."""
DAY_SECONDS, WINDOW_SECONDS = 86_400, 1_200
FIRST_TIME = 1_800_000_000
NUM_PARTITIONS = 4  # of a topic of the mock broker
NUM_NEXT = 40_000
PATIENCE_SECONDS = 120.0
MODEL: dict[str, Any] = {
    "features.user.kind": "int64",
    "features.item.kind": "string",
    "dropout": 0,
    "batch_size": 200,
    "lr": 0.005,
    "row_lr": 0.02,
}
STREAM: dict[str, Any] = {
    "features.user.admission": 2,
    "features.item.admission": 2,
    "kafka.label_window_seconds": WINDOW_SECONDS,
    "progressive": 20_000,
    "snapshots.minutes": 0.1,
    "snapshots.increments": 20,
}
ROWS_GROW, AGE_SECONDS, LESS_AUC = 1.1, 30.0, 0.005


def results(full: bool = False) -> Iterator[Result]:
    """Yield the cases of ``geartrain bench stream_day``; a day in ten minutes with ``full``."""
    seconds = 600 if full else 120
    day = Day(seconds * A_SECOND)
    with tempfile.TemporaryDirectory() as folder:
        found = trained_on_the_stream(day, seconds, Path(folder))
        clicks = {**day.fields(range(day.num_samples)), "click": day.clicked}
        pq.write_table(pa.table(clicks), f"{folder}/day.parquet")
        aucs = {}
        for passes in (1, 3):
            batch = [*GEARTRAIN, "worker", "ctr", f"--data={folder}/day.parquet", f"--out={folder}/batch-{passes}"]
            run([*batch, "--logger=none", *settings({**MODEL, "epochs": passes, "held_out": 1})])
            aucs[passes] = day.auc_of_next(Path(folder), f"batch-{passes}")
        ours = day.auc_of_next(Path(folder), "stream")
    quarter = len(found.rows) // 4
    early, late = statistics.mean(found.rows[quarter : 2 * quarter]), statistics.mean(found.rows[3 * quarter :])
    case = f"rows, mean of the last quarter; {day.num_users:,} users and {day.num_items:,} items came"
    yield result(case, late, "second quarter", early, "rows", target=1 / ROWS_GROW)
    yield result(f"oldest of {len(found.ages):,} answers", max(found.ages), "asked", AGE_SECONDS, "s", target=1.0)
    case = f"AUC on the next {NUM_NEXT:,} samples, of {day.num_samples:,} that came once, in their order"
    for passes, theirs in aucs.items():
        rival, target = f"batch training on the same, passes: {passes}", (theirs - LESS_AUC) / theirs
        yield result(case, ours, rival, theirs, "AUC", target=target, more_is_better=True)
    case = "AUC on the latest samples before they were learned from"
    yield result(case, found.progressive, "the true probabilities", day.best_auc, "AUC", more_is_better=True)


class Day:
    """Impressions of users that come and go within two hours, and of items that do within eight, with their clicks."""

    def __init__(self, num_samples: int) -> None:
        chance = np.random.default_rng(0)
        self.num_samples = num_samples
        number = np.arange(num_samples + NUM_NEXT)
        hour = 24 * np.minimum(number, num_samples) / num_samples  # what comes next is of the day's last moment
        alive_users, alive_items = num_samples // 480, 60
        self.users = (hour * alive_users / 2).astype(np.int64) + chance.integers(0, alive_users, len(number))
        self.items = (hour * alive_items / 8).astype(np.int64) + chance.integers(0, alive_items, len(number))
        self.num_users, self.num_items = (len(np.unique(ids[:num_samples])) for ids in (self.users, self.items))
        liking, quality = chance.standard_normal(self.users.max() + 1), chance.standard_normal(self.items.max() + 1)
        logits = -1.5 + 0.8 * liking[self.users] + quality[self.items] + 1.5 * (self.users % 4 == self.items % 4)
        self.probabilities = 1 / (1 + np.exp(-logits))
        self.clicked = (chance.random(len(number)) < self.probabilities).astype(np.int64)[:num_samples]
        self.next_clicked = (chance.random(NUM_NEXT) < self.probabilities[num_samples:]).astype(np.int64)
        self.delays = chance.uniform(1, WINDOW_SECONDS - 100, num_samples)
        self.best_auc = auc(self.probabilities[num_samples:], self.next_clicked)

    def fields(self, numbers: range) -> dict[str, Any]:
        """Columns of the samples with these ``numbers``."""
        some = slice(numbers.start, numbers.stop)
        return {"user": self.users[some], "item": [f"item-{item}" for item in self.items[some]]}

    def send(self, producer: kafka.Producer, seconds: float) -> dict[int, int]:
        """Send all in so many seconds; return the offset behind the last impression of each partition."""
        counts = dict.fromkeys(range(NUM_PARTITIONS), 0)
        ends = dict(counts)

        def send(impression: int, at: float, click: int, partition: int, **fields: Any) -> None:
            message = {"impression": impression, "time": at, "click": click, **fields}
            producer.produce("events", json.dumps(message), partition=partition)
            counts[partition] += 1

        began, clicks = time.monotonic(), list[tuple[float, int]]()
        for impression in range(self.num_samples):
            now = FIRST_TIME + DAY_SECONDS * impression / self.num_samples
            while clicks and clicks[0][0] <= now:
                at, clicked = heapq.heappop(clicks)
                send(clicked, at, 1, clicked % NUM_PARTITIONS)
            user, item = int(self.users[impression]), f"item-{self.items[impression]}"
            send(impression, now, 0, impression % NUM_PARTITIONS, user=user, item=item)
            ends[impression % NUM_PARTITIONS] = counts[impression % NUM_PARTITIONS]
            if self.clicked[impression]:
                heapq.heappush(clicks, (now + self.delays[impression], impression))
            if impression % 20 == 0:
                producer.poll(0)
                time.sleep(max(0.0, began + seconds * impression / self.num_samples - time.monotonic()))
        for at, clicked in sorted(clicks):
            send(clicked, at, 1, clicked % NUM_PARTITIONS)
        for partition in counts:  # a click of nothing, so late that no impression waits any longer
            send(-1, FIRST_TIME + 2 * DAY_SECONDS, 1, partition)
        producer.flush(PATIENCE_SECONDS)
        return ends

    def auc_of_next(self, folder: Path, run_name: str) -> float:
        """Of what the run's model says of the samples after the day."""
        pq.write_table(pa.table(self.fields(range(self.num_samples, len(self.users)))), folder / "next.parquet")
        scores = folder / f"{run_name}.scores.parquet"
        run([*GEARTRAIN, "predict", folder / run_name, folder / "next.parquet", f"--out={scores}"])
        return auc(pq.read_table(scores)["score"].to_numpy(), self.next_clicked)


class Found:
    """What was seen of a job and its service during the day."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.ages: list[float] = []
        self.progressive = 0.0


def trained_on_the_stream(day: Day, seconds: float, folder: Path) -> Found:
    """Send the day, have a job learn from it and a service answer; the job's run is left in ``folder``."""
    found, out, log = Found(), folder / "stream", folder / "worker.log"
    producer = kafka.Producer({"test.mock.num.brokers": 1, "log_level": 0, "linger.ms": 50})
    (broker,) = producer.list_topics(timeout=20).brokers.values()
    producer.list_topics("events", timeout=20)
    life = day.num_samples // 12 // MODEL["batch_size"]
    expiry = {"features.user.expiry": life, "features.item.expiry": life}
    with contextlib.ExitStack() as running:
        cluster = running.enter_context(running_cluster())
        job = [*GEARTRAIN, "worker", "ctr", f"--data=kafka:events@{broker.host}:{broker.port}", f"--out={out}"]
        job += [f"--scheduler={cluster['scheduler']}", "--logger=none", *settings({**MODEL, **STREAM, **expiry})]
        wrote = running.enter_context(log.open("w"))
        worker = running.enter_context(subprocess.Popen(job, stdout=wrote, stderr=subprocess.STDOUT))
        running.callback(worker.kill)
        follow = ["serve", "--follow", f"ctr={out}", "--listen=127.0.0.1:0", "--log-level=warning"]
        _, facts = running.enter_context(started([*GEARTRAIN, *follow]))
        client = running.enter_context(gt.connect(cluster["scheduler"]))
        ends: list[dict[int, int]] = []
        sending = threading.Thread(target=lambda: ends.append(day.send(producer, seconds)))
        sending.start()
        began = time.monotonic()
        while sending.is_alive():
            time.sleep(0.5)
            require_alive(worker, log)
            found.rows.append(sum(table.rows for table in client.status().tables if table.num_rows is None))
            if (age := age_of_an_answer(facts["address"], day)) is not None:
                found.ages.append(age)
            if len(found.rows) % 20 == 0:
                shown = f"answers {found.ages[-1]:.1f} s old" if found.ages else "no version yet"
                print(f"{time.monotonic() - began:.0f} s: {found.rows[-1]} rows, {shown}", flush=True)
        wait_until_saved(out, ends[0], worker, log)
        worker.send_signal(signal.SIGINT)
        worker.wait(PATIENCE_SECONDS)
    found.progressive = float(re.findall(r"AUC ([\d.]+)[^\n]* on the latest", log.read_text())[-1])
    return found


def age_of_an_answer(address: str, day: Day) -> float | None:
    """Seconds since the model that answers was in the training; None: there is none yet."""
    body = json.dumps({"samples": [{"user": int(day.users[-1]), "item": f"item-{day.items[-1]}"}]}).encode()
    try:
        with urllib.request.urlopen(f"http://{address}/v1/click", body, timeout=60) as answer:
            return time.time() - float(json.loads(answer.read())["created"])
    except urllib.error.HTTPError as exc:
        if exc.code != 503:
            raise
        return None


def wait_until_saved(out: Path, ends: dict[int, int], worker: subprocess.Popen[bytes], log: Path) -> None:
    """Until a snapshot of the run holds what was learned from every impression, up to the offsets ``ends``."""
    end = time.monotonic() + PATIENCE_SECONDS
    while True:
        snapshots = (entry.snapshot for entry in list_snapshots(str(out / "snapshots")))
        newest = next((snapshot for snapshot in snapshots if snapshot is not None), None)
        state: dict[str, Any] = {} if newest is None else newest.manifest.job
        cursors = state["data"]["cursors"] if state else {}
        if state and all(place_of(cursors[str(partition)][1])[0] >= offset for partition, offset in ends.items()):
            return
        require_alive(worker, log)
        if time.monotonic() > end:
            raise GeartrainError(f"the job is not through the topic after {PATIENCE_SECONDS:g} s: {log.read_text()}")
        time.sleep(0.5)


def require_alive(worker: subprocess.Popen[bytes], log: Path) -> None:
    """Raise GeartrainError if it ended."""
    if worker.poll() is not None:
        raise GeartrainError(f"the job ended with {worker.returncode}: {log.read_text()}")


def settings(recipe: dict[str, Any]) -> list[str]:
    """Flags that say them."""
    return [f"--set={key}={value}" for key, value in recipe.items()]


def run(command: Sequence[object]) -> None:
    """Run it to its end. Raises GeartrainError with what it wrote if it failed."""
    ended = subprocess.run([*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if ended.returncode:
        raise GeartrainError(f"'{' '.join(map(str, command))}' ended with {ended.returncode}: {ended.stdout}")
