"""CPU cost of a monitored scheduler of 100 shards and 1,000 workers: share of a core, at most 5 %.

Shards and workers are simulated by this process: heartbeats of shards and words of jobs as they send them, a second
apart or as the scheduler says. Watched: scraped by Prometheus every 15 s (its default is a minute) and asked by one
``geartrain top``. Only the first worker of a job tells, so 1,000 workers may be ten jobs of 100, or 1,000 jobs of one.
One more case is watched by ``geartrain dashboard`` alone, with a page open.
"""

from __future__ import annotations

import os
import random
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPException
from threading import Thread

import psutil
from _common import result
from _up import GEARTRAIN, started

from geartrain.ams.rpc.client.scheduler import GrpcSchedulerCarrier
from geartrain.ams.rpc.wire import WIRE
from geartrain.ams.values.config import FOLDER_VARIABLE, NO_FOLDER, identify
from geartrain.ams.values.scheduler_messages import (
    DescribeCluster,
    DescribeJobs,
    Heartbeat,
    HeartbeatResult,
    JobReport,
    JobReportReply,
    ReadEvents,
    Register,
    ReportJob,
)
from geartrain.launch.bench import Result
from geartrain.watch.polls import JOBS_PER_LOOK

NEEDS = ("prometheus_client",)
SHARDS, SECONDS, SCRAPE_SECONDS, TICKS = 100, 15, 15, 20
TARGET_PERCENT = 5.0
_Who = tuple[type, int]


def results(full: bool = False) -> Iterator[Result]:
    """Yield the cases of ``geartrain bench metrics``; ``full`` looks twice as long."""
    identify(NO_FOLDER)
    seconds = SECONDS * (2 if full else 1)
    alone = _percent_of_a_core(jobs=0, watched=False, seconds=seconds)
    for jobs, who, target in ((10, "1,000 workers in ten jobs", 1.0), (1_000, "1,000 jobs of one worker", 1.0)):
        unwatched = _percent_of_a_core(jobs=jobs, watched=False, seconds=seconds)
        watched = _percent_of_a_core(jobs=jobs, watched=True, seconds=seconds)
        case = f"{SHARDS} shards and {who}, watched ({alone:.1f} % without jobs, {unwatched:.1f} % unwatched)"
        yield result(case, watched, "5 % of a core", TARGET_PERCENT, "%", target=target)
    closed, shown = (
        _percent_of_a_core(jobs=50, watched=False, shown=is_shown, seconds=30) for is_shown in (False, True)
    )
    case = f"{SHARDS} shards and 50 jobs: a dashboard with a page open ({shown:.1f} %, {closed:.1f} % without)"
    yield result(case, max(0.1, shown - closed), "5 % of a core", TARGET_PERCENT, "%", target=1.0)


def _percent_of_a_core(*, jobs: int, watched: bool, seconds: int, shown: bool = False) -> float:
    command = ["scheduler", "--listen=127.0.0.1:0", f"--num-shards={SHARDS}", "--metrics=127.0.0.1:0"]
    without = os.environ | {FOLDER_VARIABLE: NO_FOLDER}
    with started([*GEARTRAIN, *command], without) as (process, facts), ExitStack() as stack:
        try:
            carrier = GrpcSchedulerCarrier(facts["address"])
            for shard in range(SHARDS):
                joins = Register(address=f"127.0.0.1:{shard + 1}", shard=shard, incarnation=shard + 1, wire=WIRE)
                carrier.call(joins, 10)
            usage = psutil.Process(process.pid)
            words = _Words(carrier, jobs)
            heard = stack.enter_context(_open_page(facts["address"], without)) if shown else []
            before, began = usage.cpu_times(), time.monotonic()
            for second in range(seconds):
                if watched:
                    for request in (DescribeCluster(), ReadEvents(since=2**62), ReadEvents()):
                        carrier.call(request, 10)
                    if second % max(1, jobs // JOBS_PER_LOOK) == 0:
                        carrier.call(DescribeJobs(), 10)
                    if second % SCRAPE_SECONDS == 0:
                        urllib.request.urlopen(f"http://{facts['metrics']}/metrics").read()
                words.one_second()
            after, elapsed = usage.cpu_times(), time.monotonic() - began
            if shown and len(heard) < seconds / 3:
                raise RuntimeError(f"the page was told {len(heard)} times in {seconds} s: nothing was measured")
            carrier.close()
        finally:
            process.kill()
    return 100 * (after.user + after.system - before.user - before.system) / elapsed


@contextmanager
def _open_page(scheduler: str, env: Mapping[str, str]) -> Iterator[list[bytes]]:
    """A dashboard with a page open, and what the page is told."""
    with started([*GEARTRAIN, "dashboard", f"--scheduler={scheduler}", "--listen=127.0.0.1:0"], env) as (_, facts):
        browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        browser.open(facts["url"]).read()
        events = browser.open(f"http://{facts['address']}/events")
        heard: list[bytes] = []

        def listen() -> None:
            with suppress(OSError, HTTPException):  # it ends with the dashboard
                heard.extend(line for line in events if line.startswith(b"data:"))

        Thread(target=listen, daemon=True).start()
        yield heard


class _Words:
    """What shards and jobs send: the first of each at once, each next one after the pause that it was told."""

    def __init__(self, carrier: GrpcSchedulerCarrier, jobs: int) -> None:
        self._carrier, self._jobs = carrier, jobs
        shards = [(kind, number) for kind, many in ((Heartbeat, SHARDS), (ReportJob, jobs)) for number in range(many)]
        self._say(shards)
        pauses = self._say(shards)  # by now it knows how many they are
        now = time.monotonic()
        self._due = {who: now + random.random() * pauses[who] for who in shards}

    def one_second(self) -> None:
        """Those that are due in it."""
        for _ in range(TICKS):
            began = time.monotonic()
            said = self._say([who for who, at in self._due.items() if at <= began])
            self._due |= {who: began + pause for who, pause in said.items()}
            time.sleep(max(0.0, began + 1 / TICKS - time.monotonic()))

    def _say(self, who: list[_Who]) -> dict[_Who, float]:
        report = JobReport(step=int(time.monotonic()), last_step=10_000, steps_per_second=100.0, loss=0.5)
        calls: list[tuple[_Who, Callable[[], HeartbeatResult | JobReportReply]]] = []
        for kind, number in who:
            word = (
                Heartbeat(shard=number, incarnation=number + 1, memory_pool="m", wire=WIRE)
                if kind is Heartbeat
                else ReportJob(job=f"job-{number}", incarnation=1, report=report)
            )
            calls.append(((kind, number), self._carrier.start(word, 10)))
        return {one: max(1.0, call().pause_seconds) for one, call in calls}
