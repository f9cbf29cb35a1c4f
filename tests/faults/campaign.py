"""The campaign: as many faults as fit in a budget, seeds recorded, results added to those of earlier campaigns.

``make campaign BUDGET_MINUTES=40``; one seed again: ``make campaign ONLY=kills SEED=123``. Each run is a process of its
own, so that one that hangs is ended, and one that fails is repeated exactly as it ran. The time goes to the fault that
has had least of its share. Ctrl-C keeps what was done.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

import geartrain
from tests.faults.campaign_faults import Fault, all_faults
from tests.faults.mutations import removed_by_environment

RESULTS = Path("docs/campaign.json")
GRACE_SECONDS = 30.0
"""How long a run, but for the first, may go on after the budget is used up; then it is ended and not counted."""
UNEXPLAINED = "not explained yet"
_POLL_SECONDS = 0.1


@dataclass
class Tally:
    """What has become of one fault, over all campaigns."""

    runs: int = 0
    units: int = 0
    unit: str = ""
    failures: int = 0
    failed_seeds: dict[str, str] = field(default_factory=dict)
    """By seed: what it was, as whoever mended it wrote here by hand; until then UNEXPLAINED."""
    seconds: float = 0.0
    last_seed: int = 0
    """Seeds 1 … last_seed have been run, but for those cut short, which were not counted."""
    date: str = ""
    version: str = ""


@dataclass(frozen=True)
class Result:
    """One run."""

    seed: int
    units: int
    seconds: float
    error: str | None = None
    """What it said, if it failed."""
    is_cut_short: bool = False


class Results:
    """The file of results: read once, written whole after every run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        found = json.loads(path.read_text("utf-8"))["faults"] if path.exists() else {}
        self.tallies = {name: Tally(**fields) for name, fields in found.items()}

    def add(self, fault: Fault, result: Result) -> None:
        """Count a run and write the file."""
        tally = self.tallies.setdefault(fault.name, Tally())
        tally.runs += 1
        tally.units += result.units
        tally.unit = fault.unit
        tally.seconds = round(tally.seconds + result.seconds, 1)
        tally.last_seed = max(tally.last_seed, result.seed)
        tally.date = datetime.datetime.now(datetime.UTC).date().isoformat()
        tally.version = geartrain.__version__
        if result.error is not None:
            tally.failures += 1
            tally.failed_seeds[str(result.seed)] = UNEXPLAINED
        self._write()

    def next_seed(self, name: str) -> int:
        """Return the first seed that was never run."""
        return self.tallies[name].last_seed + 1 if name in self.tallies else 1

    def _write(self) -> None:
        lines = [f"  {json.dumps(name)}: {json.dumps(vars(tally))}" for name, tally in sorted(self.tallies.items())]
        part = self._path.with_suffix(".part")
        part.write_text('{\n "faults": {\n' + ",\n".join(lines) + "\n }\n}\n", "utf-8")
        part.replace(self._path)


class Campaign:
    """Runs of faults beside each other until the budget is used up."""

    def __init__(self, faults: Sequence[Fault], results: Results, jobs: int, console: Console) -> None:
        self._faults = faults
        self._results, self._jobs, self._console = results, jobs, console
        self._next_seed = {fault.name: results.next_seed(fault.name) for fault in faults}
        self._spent = {fault.name: 0.0 for fault in faults}
        self._begun = {fault.name: 0 for fault in faults}
        """Units that the runs begun so far will make."""
        self._per_run = {fault.name: 1 for fault in faults}
        self._stop = threading.Event()
        self._has_counted = False
        self.failed: list[tuple[Fault, Result]] = []

    def run(self, budget_seconds: float) -> None:
        """Use up the budget, with one run at least; on KeyboardInterrupt end what runs and return."""
        deadline = time.monotonic() + budget_seconds
        columns = (
            TextColumn("{task.description:>10}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}, {task.fields[failures]} failed"),
            TimeElapsedColumn(),
        )
        under_way: dict[Future[Result], tuple[Fault, float]] = {}
        with Progress(*columns, console=self._console) as progress, ThreadPoolExecutor(self._jobs) as pool:
            bars = {
                fault.name: progress.add_task(fault.name, total=fault.target, unit=fault.unit, failures=0)
                for fault in self._faults
            }
            try:
                while True:
                    is_over = any(self._begun.values()) and time.monotonic() >= deadline
                    while not is_over and len(under_way) < self._jobs and (fault := self._neediest()) is not None:
                        seed = self._begin(fault)
                        under_way[pool.submit(run_apart, fault, seed, self._stop)] = fault, time.monotonic()
                    if not under_way:
                        return
                    if self._has_counted and time.monotonic() > deadline + GRACE_SECONDS:
                        self._stop.set()
                    for future in wait(under_way, timeout=1.0, return_when=FIRST_COMPLETED).done:
                        fault, began = under_way.pop(future)
                        self._count(fault, future.result(), time.monotonic() - began, progress, bars[fault.name])
            except KeyboardInterrupt:
                self._console.print("ended early; what was done is recorded")
            finally:
                self._stop.set()

    def _neediest(self) -> Fault | None:
        open_ones = [fault for fault in self._faults if self._begun[fault.name] < fault.target]
        return min(open_ones, key=lambda fault: self._spent[fault.name] / fault.share, default=None)

    def _begin(self, fault: Fault) -> int:
        seed = self._next_seed[fault.name]
        self._next_seed[fault.name] += 1
        self._begun[fault.name] += self._per_run[fault.name]
        self._spent[fault.name] += 1.0  # until it is known, so that not all begin with the same fault
        return seed

    def _count(self, fault: Fault, result: Result, seconds: float, progress: Progress, bar: TaskID) -> None:
        self._spent[fault.name] += seconds - 1.0
        if result.is_cut_short:
            return
        self._begun[fault.name] += max(result.units, 1) - self._per_run[fault.name]
        self._per_run[fault.name] = max(result.units, 1)
        self._results.add(fault, result)
        self._has_counted = True
        progress.advance(bar, result.units)
        if result.error is not None:
            self.failed.append((fault, result))
            progress.update(bar, failures=sum(item.name == fault.name for item, _ in self.failed))
            self._console.print(f"{_failure(fault, result)}")


def run_apart(fault: Fault, seed: int, stop: threading.Event) -> Result:
    """Run one seed in a process of its own, with all it starts in one group that is ended together."""
    folder = Path(tempfile.mkdtemp(prefix=f"geartrain-{fault.name}-{seed}-"))
    start = time.monotonic()
    with (folder / "output").open("w+", encoding="utf-8") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.campaign", "--one", fault.name, str(seed), str(folder / "run")],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        is_late = False
        while process.poll() is None and not stop.wait(_POLL_SECONDS):
            if is_late := time.monotonic() - start > fault.timeout_seconds:
                break
        is_cut_short = process.poll() is None and not is_late
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        output.seek(0)
        said = output.read()
    shutil.rmtree(folder, ignore_errors=True)
    seconds = time.monotonic() - start
    if is_late:
        return Result(seed, 0, seconds, f"not done after {fault.timeout_seconds:g} s\n{said[-4000:]}")
    if process.returncode == 0:
        units = next(line for line in reversed(said.splitlines()) if line.isdecimal())  # logs of its end may follow
        return Result(seed, int(units), seconds)
    return Result(seed, 0, seconds, said[-4000:], is_cut_short)


def run_here(fault: Fault, seed: int, folder: Path) -> int:
    """Run one seed in this process; print its units last and return the exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with removed_by_environment():
            units = fault.run(seed, folder)
    except BaseException:
        traceback.print_exc()
        return 1
    print(units)
    return 0


def _failure(fault: Fault, result: Result) -> str:
    last = (result.error or "").strip().splitlines()[-1:]
    return (
        f"{fault.name}, seed {result.seed}: FAILED: {''.join(last)}\n"
        f"  again: make campaign ONLY={fault.name} SEED={result.seed}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code: 1 if anything failed."""
    faults = {fault.name: fault for fault in all_faults()}
    parser = argparse.ArgumentParser(prog="make campaign", description=__doc__.split("\n\n")[0])
    parser.add_argument("--budget-minutes", type=float, default=40.0, help="wall time in minutes (default: 40)")
    parser.add_argument("--only", choices=faults, help="one fault alone")
    parser.add_argument("--seed", type=int, help="with --only: this seed alone, here, and nothing recorded")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at once (default: one for a core)")
    parser.add_argument("--results", type=Path, default=RESULTS, help=f"file of results (default: {RESULTS})")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    given: Any = parser.parse_args(arguments)
    if given.one is not None:
        name, seed, folder = given.one
        return run_here(faults[name], int(seed), Path(folder))
    if given.seed is not None:
        if given.only is None:
            parser.error("--seed needs --only: which fault's seed?")
        with tempfile.TemporaryDirectory() as folder:
            return run_here(faults[given.only], given.seed, Path(folder) / "run")
    console = Console(stderr=True)
    chosen = [fault for name, fault in faults.items() if given.only in (None, name)]
    campaign = Campaign(chosen, Results(given.results), given.jobs, console)
    campaign.run(given.budget_minutes * 60)
    for fault, result in campaign.failed:
        console.print(result.error or "", markup=False, highlight=False)
        console.print(_failure(fault, result), markup=False)
    return 1 if campaign.failed else 0


if __name__ == "__main__":
    sys.exit(main())
