"""Trains glyphs on a cluster, kills each of its roles in turn, and ends with the accuracy of an undisturbed run.

    python examples/kill_and_recover.py [--classes 2000] [--steps 240] [--out runs/kill_and_recover]

Needs nothing but this machine: it starts the cluster itself. With the defaults it takes about three minutes, and the
fonts of ``make quickstart`` (134 MB, once).
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil

GEARTRAIN = [sys.executable, "-m", "geartrain"]
SNAPSHOT_STEPS = 20


def say(line: str) -> None:
    print(f"--- {line}", flush=True)


def newest_step(out: Path) -> int:
    """The step of the newest whole snapshot of a run, 0 if there is none."""
    return max((int(folder.name.split("-")[1]) for folder in (out / "snapshots").glob("step-*")), default=0)


def worker(arguments: argparse.Namespace, out: Path, *more: str) -> subprocess.Popen[bytes]:
    own = ["--out", str(out), "--set", f"classes={arguments.classes}", "--steps", str(arguments.steps)]
    own += ["--set", f"snapshots.steps={SNAPSHOT_STEPS}", "--cache", arguments.cache]
    return subprocess.Popen([*GEARTRAIN, "worker", "glyphs", *(more or own), "--scheduler", arguments.scheduler])


def role(cluster: psutil.Process, name: str) -> psutil.Process:
    """The first live process of the cluster that runs a role."""
    while True:
        for child in cluster.children():
            try:
                if name in child.cmdline():
                    return child
            except psutil.Error:  # it has just died
                continue
        time.sleep(0.1)


def await_step(process: subprocess.Popen[bytes], out: Path, step: int) -> None:
    """Wait until the run has a snapshot of ``step`` or a later one."""
    while newest_step(out) < step:
        if process.poll() is not None:
            raise SystemExit(f"the worker ended with {process.returncode} before step {step}")
        time.sleep(0.1)


def disturbed(arguments: argparse.Namespace, cluster: psutil.Process, out: Path) -> None:
    """Train, and kill a shard, the scheduler, the worker, and a shard with the scheduler."""
    quarter = max(SNAPSHOT_STEPS, arguments.steps // 5)
    process = worker(arguments, out)
    try:
        for number, victims in enumerate((["server"], ["scheduler"], ["worker"], ["server", "scheduler"]), 1):
            await_step(process, out, number * quarter)
            for victim in victims:
                say(f"step {newest_step(out)} is saved; killing the {victim} (SIGKILL)")
                if victim != "worker":
                    role(cluster, victim).kill()
                    continue
                process.kill()
                process.wait()
                process = worker(arguments, out, "--resume", str(out), "--cache", arguments.cache)
        if process.wait():
            raise SystemExit(f"the worker ended with {process.returncode}")
    finally:
        process.kill()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/kill_and_recover"))
    parser.add_argument("--cache", default=".cache")
    arguments = parser.parse_args()
    if arguments.steps < 5 * SNAPSHOT_STEPS:
        parser.error(f"--steps is {arguments.steps}; it must be at least {5 * SNAPSHOT_STEPS} to be killed four times")
    for run in ("undisturbed", "disturbed"):
        shutil.rmtree(arguments.out / run, ignore_errors=True)

    command = [*GEARTRAIN, "up", "--json", "--scheduler-listen=127.0.0.1:0", f"--shards={arguments.shards}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as up:
        try:
            assert up.stdout is not None
            arguments.scheduler = json.loads(up.stdout.readline())["scheduler"]
            say("an undisturbed run")
            if worker(arguments, arguments.out / "undisturbed").wait():
                raise SystemExit("the undisturbed run failed")
            say("the same run, disturbed")
            disturbed(arguments, psutil.Process(up.pid), arguments.out / "disturbed")
        finally:
            up.terminate()

    reports = [json.loads((arguments.out / run / "report.json").read_text()) for run in ("undisturbed", "disturbed")]
    for family, expected in reports[0]["held_out"].items():
        found = reports[1]["held_out"][family]
        verdict = "equal" if found["top1"] == expected["top1"] else "DIFFERENT"
        say(f"{family}: top-1 {expected['top1']:.4f} undisturbed, {found['top1']:.4f} disturbed: {verdict}")


if __name__ == "__main__":
    main()
