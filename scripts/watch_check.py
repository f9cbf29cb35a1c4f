"""What on-call people are given, for real: Prometheus with the rules of deploy/prometheus beside a cluster that trains.

Every panel of deploy/grafana/geartrain.json has data, every alert whose fault takes seconds fires when it is made, and
goes out. Those that need hours have them in alerts.test.yml, which promtool runs. Times are shortened by SHORTER.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.support.movielens_files import write_movielens
from tests.support.served_models import exported, picture

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
RULES = DEPLOY / "prometheus" / "alerts.yml"
SHORTER = {
    r"for: \w+": "for: 1s",
    r"> 120$": "> 8",
    r"\[1h\]\) > 3": "[1h]) > 0",
    r"> 3 \* \(": "> 0.01 * (",
    r"> 0\.85": "> 0.0000001",
    r"interval: 30s": "interval: 1s",
}
"""Of the rules: how long, how often and how much, never what."""
PROMPTLY_SECONDS = float(os.environ.get("WATCH_SECONDS", "120"))
"""For whatever is to show; a machine that does nothing else needs 15."""


class Failed(Exception):
    """What was to be seen was not."""


def missing() -> str:
    """Why this cannot be run here; empty if it can."""
    programs = [name for name in ("prometheus", "promtool") if shutil.which(name) is None]
    if programs:
        return f"{' and '.join(programs)} not installed (Debian: apt-get install prometheus)"
    wanted = {"prometheus_client": "metrics", "confluent_kafka": "kafka", "onnxscript": "onnx", "onnxruntime": "serve"}
    for library, extra in wanted.items():
        if importlib.util.find_spec(library) is None:
            return f"{library} is not installed (pip install 'geartrain[{extra}]')"
    return ""


def panels() -> Iterator[tuple[str, str]]:
    """(title, query) of each panel's queries."""
    dashboard = json.loads((DEPLOY / "grafana" / "geartrain.json").read_text(encoding="utf-8"))
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"].replace("$cluster", ".*").replace("$__rate_interval", "10s")


def shortened() -> str:
    """The rules with other numbers, each of SHORTER being there."""
    text = RULES.read_text(encoding="utf-8")
    for pattern, other in SHORTER.items():
        text, count = re.subn(pattern, other, text, flags=re.MULTILINE)
        if not count:
            raise Failed(f"{RULES} has no {pattern!r} any more: mend SHORTER")
    return text


@contextmanager
def process(*command: str, log: Path) -> Iterator[subprocess.Popen[str]]:
    """One that is ended with the block, stopped or not."""
    with (
        log.open("w", encoding="utf-8") as written,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=written, text=True) as running,
    ):
        try:
            yield running
        finally:
            running.kill()


def told(running: subprocess.Popen[str]) -> dict[str, Any]:
    """A role's ready line."""
    assert running.stdout is not None
    line = running.stdout.readline()
    if not line:
        raise Failed(f"{running.args} ended before it was ready")
    threading.Thread(target=running.stdout.read, daemon=True).start()
    return json.loads(line)  # type: ignore[no-any-return]


class Watch:
    """A cluster of two servers, a worker that trains, and Prometheus; all in one folder."""

    def __init__(self, folder: Path, films: str, stack: ExitStack) -> None:
        self.folder, self._films, self._stack = folder, films, stack
        self._number = 0
        self.roles: dict[str, subprocess.Popen[str]] = {}
        self.targets: dict[str, str] = {}
        self.start("scheduler", "scheduler", "--num-shards=2", "--lease-seconds=2", "--listen=127.0.0.1:0")
        self.scheduler = self.facts["address"]
        for shard in (0, 1):
            self.serve(shard)
        self.train()
        self.answer()
        (folder / "alerts.yml").write_text(shortened(), encoding="utf-8")
        self.prometheus = self._start_prometheus()

    def start(self, name: str, *arguments: str) -> None:
        """Start a role, in the place of the one of that name, and scrape it."""
        self._number += 1
        log = self.folder / f"{name}-{self._number}.log"
        command = [sys.executable, "-m", "geartrain", *arguments, "--metrics=127.0.0.1:0"]
        self.roles[name] = self._stack.enter_context(process(*command, log=log))
        self.facts = told(self.roles[name])
        self.targets[name] = self.facts["metrics"]
        self._write_targets()

    def serve(self, shard: int, name: str = "") -> None:
        """Start a server of one shard."""
        flags = ["--heartbeat-seconds=0.2", "--listen=127.0.0.1:0", "--wait"]
        self.start(name or f"server {shard}", "server", f"--scheduler={self.scheduler}", f"--shard={shard}", *flags)

    def train(self, name: str = "worker", *more: str) -> None:
        """Start a worker, or start it again."""
        self._number += 1
        run = ["--data", self._films, "--out", str(self.folder / name / "run")]
        run += ["--snapshots", str(self.folder / name / "snapshots")]
        small = ["--steps=10000000", "--logger=none", "--set=batch_size=50", "--set=dim=4", "--set=snapshots.steps=20"]
        port = self._free_port()
        command = [sys.executable, "-m", "geartrain", "worker", "ctr", *run, *small, *more, "--continue"]
        command += [f"--scheduler={self.scheduler}", f"--metrics=127.0.0.1:{port}"]
        log = self.folder / f"{name}-{self._number}.log"
        worker = self._stack.enter_context(process(*command, log=log))
        assert worker.stdout is not None
        threading.Thread(target=worker.stdout.read, daemon=True).start()
        self.roles[name], self.targets[name] = worker, f"127.0.0.1:{port}"
        self._write_targets()

    def loop(self) -> subprocess.Popen[str]:
        """Start a loop of one's own, which has what the worker has not."""
        log, command = self.folder / "loop.log", [sys.executable, "-m", "scripts.watch_loop", self.scheduler]
        running = self._stack.enter_context(process(*command, log=log))
        self.targets["loop"] = told(running)["metrics"]
        self._write_targets()
        return running

    def answer(self) -> None:
        """Start a service of a small model, and ask it now and then."""
        model = exported(self.folder / "model")
        self.start("serve", "serve", str(model), "--listen=127.0.0.1:0")
        request = urllib.request.Request(f"{self.facts['url']}/v1/classify", picture(1), {"Content-Type": "image/png"})

        def ask() -> None:
            while self.roles["serve"].poll() is None:
                with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=1) as answer:
                    answer.read()
                time.sleep(0.2)

        threading.Thread(target=ask, daemon=True).start()

    @property
    def snapshots(self) -> Path:
        """Where those of the worker go."""
        return self.folder / "worker" / "snapshots"

    def query(self, expression: str) -> list[dict[str, Any]]:
        """What an expression is now."""
        asked = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"{self.prometheus}/api/v1/query?{asked}", timeout=10) as answer:
            return json.load(answer)["data"]["result"]  # type: ignore[no-any-return]

    def firing(self) -> set[str]:
        """Names of the alerts that fire."""
        return {found["metric"]["alertname"] for found in self.query('ALERTS{alertstate="firing"}')}

    def until(self, what: str, holds: Callable[[], object]) -> None:
        """Wait for what is to show."""
        began = time.monotonic()
        while not holds():
            if time.monotonic() - began > PROMPTLY_SECONDS:
                raise Failed(f"{what}: not within {PROMPTLY_SECONDS:g} s; firing: {sorted(self.firing())}")
            time.sleep(0.5)
        print(f"{time.monotonic() - began:6.1f} s  {what}", flush=True)

    def fires(self, alert: str, fault: str) -> None:
        """Wait until an alert does."""
        self.until(f"{alert} fires: {fault}", lambda: alert in self.firing())

    def goes_out(self, alert: str) -> None:
        """Wait until it does not any more."""
        self.until(f"{alert} goes out", lambda: alert not in self.firing())

    def _free_port(self) -> int:
        import socket

        with socket.create_server(("127.0.0.1", 0)) as listening:
            return int(listening.getsockname()[1])

    def _write_targets(self) -> None:
        text = json.dumps([{"targets": list(self.targets.values())}])
        written = self.folder / "targets.json.new"
        written.write_text(text, encoding="utf-8")
        written.rename(self.folder / "targets.json")

    def _start_prometheus(self) -> str:
        (self.folder / "prometheus.yml").write_text(
            json.dumps(
                {
                    "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                    "rule_files": ["alerts.yml"],
                    "scrape_configs": [
                        {
                            "job_name": "geartrain",
                            "honor_labels": True,
                            "file_sd_configs": [{"files": ["targets.json"], "refresh_interval": "1s"}],
                        }
                    ],
                }
            ),
            encoding="utf-8",
        )
        port = self._free_port()
        self._stack.enter_context(
            process(
                "prometheus",
                f"--config.file={self.folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={self.folder / 'tsdb'}",
                f"--web.listen-address=127.0.0.1:{port}",
                log=self.folder / "prometheus.log",
            )
        )
        return f"http://127.0.0.1:{port}"


def check_rules() -> None:
    """Let promtool look at the rules and run their tests. Raises Failed."""
    for command in (
        ["promtool", "check", "config", str(DEPLOY / "prometheus" / "prometheus.yml")],
        ["promtool", "test", "rules", str(DEPLOY / "prometheus" / "alerts.test.yml")],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Failed(f"{' '.join(command)}:\n{done.stdout}{done.stderr}")
    print("promtool: rules and their tests are right", flush=True)


def check(folder: Path, films: str) -> None:
    """Run it all. Raises Failed."""
    check_rules()
    with ExitStack() as stack:
        watch = Watch(folder, films, stack)
        loop = watch.loop()
        for title, expression in panels():
            watch.until(f"panel {title!r}", lambda expression=expression: _answers(watch, expression))
        loop.kill()
        make_faults(watch)


def _answers(watch: Watch, expression: str) -> bool:
    try:
        return bool(watch.query(expression))
    except OSError:
        return False  # Prometheus is not up yet


def make_faults(watch: Watch) -> None:
    """One after the other; each is mended before the next."""
    watch.fires("GeartrainMemory", "tables take more than a ten-millionth of the limit")
    watch.fires("GeartrainSnapshotOld", "the newest is older than a hundredth of its interval")
    quiet = {
        "GeartrainShardDown",
        "GeartrainJobStands",
        "GeartrainJobFailed",
        "GeartrainSchedulerAbsent",
        "GeartrainSnapshotFailed",
        "GeartrainServeNotReady",
        "GeartrainServeErrors",
    }
    if firing := watch.firing() & (quiet | {"GeartrainTakeover", "GeartrainRecoveries", "GeartrainClocksApart"}):
        raise Failed(f"{sorted(firing)} fire, and nothing is wrong")

    aside = watch.snapshots.rename(watch.folder / "aside")
    watch.snapshots.touch()  # a file where the folder was
    watch.fires("GeartrainSnapshotFailed", "a file lies where snapshots are to go")
    watch.snapshots.unlink()
    aside.rename(watch.snapshots)

    watch.roles["server 1"].send_signal(signal.SIGSTOP)
    watch.fires("GeartrainShardDown", "server 1 is stopped for longer than its lease")
    old = watch.roles["server 1"]
    watch.serve(1, "server 1 again")
    old.send_signal(signal.SIGCONT)
    watch.goes_out("GeartrainShardDown")
    watch.fires("GeartrainTakeover", "another process is shard 1, and the stopped one goes on")
    watch.fires("GeartrainRecoveries", "the job went back to its snapshot")

    watch.goes_out("GeartrainJobStands")
    watch.roles["worker"].send_signal(signal.SIGSTOP)
    watch.fires("GeartrainJobStands", "the worker is stopped")
    watch.roles["worker"].send_signal(signal.SIGCONT)
    watch.goes_out("GeartrainJobStands")

    watch.train("diverges", "--set=lr=1e30")
    watch.fires("GeartrainJobFailed", "a second worker ends with an error")

    watch.roles["serve"].send_signal(signal.SIGSTOP)
    watch.fires("GeartrainServeNotReady", "the service of a model is stopped")
    watch.roles["serve"].send_signal(signal.SIGCONT)
    watch.goes_out("GeartrainServeNotReady")

    watch.roles["scheduler"].send_signal(signal.SIGSTOP)
    watch.fires("GeartrainSchedulerAbsent", "the scheduler is stopped")
    watch.roles["scheduler"].send_signal(signal.SIGCONT)
    watch.goes_out("GeartrainSchedulerAbsent")


def main() -> None:
    """``make watch-check``."""
    if why := missing():
        sys.exit(f"watch-check cannot run: {why}")
    os.environ["GEARTRAIN_SECURITY__FOLDER"] = "none"
    with tempfile.TemporaryDirectory(prefix="geartrain-watch-") as folder:
        try:
            check(Path(folder), str(write_movielens(Path(folder) / "films")))
        except Failed as failed:
            for log in sorted(Path(folder).glob("*.log")):
                print(f"--- {log.name}\n{log.read_text(encoding='utf-8')[-1500:]}", file=sys.stderr)
            sys.exit(f"watch-check failed: {failed}")
    print("Every panel has data, every alert fires.")


if __name__ == "__main__":
    main()
