"""What a scheduler of 100 shards and 1,000 workers costs that is watched: share of a core, at most 5 %.

Shards and workers are simulated by this process: a heartbeat of each shard and a word of each job a second, as they
send them. Watched: scraped by Prometheus every 15 s (its default is a minute) and asked by one ``geartrain top``. Only
the first worker of a job tells, so 1,000 workers are ten jobs of 100; 1,000 jobs of one worker show what that saves.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

import psutil
from _common import result

from geartrain.ams.rpc.client.scheduler import GrpcSchedulerCarrier
from geartrain.ams.values.config import FOLDER_VARIABLE, NO_FOLDER, identify
from geartrain.ams.values.scheduler_messages import (
    DescribeCluster,
    DescribeJobs,
    Heartbeat,
    JobReport,
    ReadEvents,
    Register,
    TellJob,
)
from geartrain.launch.bench import Result

SHARDS, SECONDS, SCRAPE_SECONDS, TICKS = 100, 8, 15, 20
TARGET_PERCENT = 5.0


def results(full: bool = False) -> Iterator[Result]:
    """The cases of ``geartrain bench metrics``; ``full`` looks four times as long."""
    identify(NO_FOLDER)
    seconds = SECONDS * (4 if full else 1)
    alone = _percent_of_a_core(jobs=0, watched=False, seconds=seconds)
    for jobs, who, target in ((10, "1,000 workers in ten jobs", 1.0), (1_000, "1,000 jobs of one worker", None)):
        unwatched = _percent_of_a_core(jobs=jobs, watched=False, seconds=seconds)
        watched = _percent_of_a_core(jobs=jobs, watched=True, seconds=seconds)
        case = f"{SHARDS} shards and {who}, watched ({alone:.1f} % without jobs, {unwatched:.1f} % unwatched)"
        yield result(case, watched, "5 % of a core", TARGET_PERCENT, "%", target=target)


def _percent_of_a_core(*, jobs: int, watched: bool, seconds: int) -> float:
    command = ["scheduler", "--listen=127.0.0.1:0", f"--num-shards={SHARDS}", "--metrics=127.0.0.1:0"]
    without = os.environ | {FOLDER_VARIABLE: NO_FOLDER}
    command = [sys.executable, "-m", "geartrain", *command]
    with subprocess.Popen(command, env=without, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            facts = json.loads(process.stdout.readline())
            carrier = GrpcSchedulerCarrier(facts["address"])
            for shard in range(SHARDS):
                carrier.call(Register(address=f"host{shard}:7000", shard=shard, incarnation=shard + 1), 10)
            usage = psutil.Process(process.pid)
            _one_second(carrier, jobs, 0)
            before = usage.cpu_times()
            for second in range(seconds):
                if watched:
                    for request in (DescribeCluster(), DescribeJobs(), ReadEvents(since=2**62), ReadEvents()):
                        carrier.call(request, 10)
                    if second % SCRAPE_SECONDS == 0:
                        urllib.request.urlopen(f"http://{facts['metrics']}/metrics").read()
                _one_second(carrier, jobs, second)
            after = usage.cpu_times()
            carrier.close()
        finally:
            process.kill()
    return 100 * (after.user + after.system - before.user - before.system) / seconds


def _one_second(carrier: GrpcSchedulerCarrier, jobs: int, second: int) -> None:
    """What shards and jobs send in a second, spread over it."""
    began = time.monotonic()
    report = JobReport(step=100 * second, last_step=10_000, steps_per_second=100.0, loss=0.5)
    words = [Heartbeat(shard=shard, incarnation=shard + 1, memory_pool="m") for shard in range(SHARDS)]
    words += [TellJob(job=f"job-{number}", incarnation=1, report=report) for number in range(jobs)]
    for tick in range(TICKS):
        for call in [carrier.begin(word, 10) for word in words[tick::TICKS]]:
            call()
        time.sleep(max(0.0, began + (tick + 1) / TICKS - time.monotonic()))
