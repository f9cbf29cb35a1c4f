"""``geartrain up``: a scheduler and its servers as processes of this machine, from start to stop.

One thread decides: events of children and signals reach it through one queue. A role that dies is restarted at its
address, so that its cluster finds it; one that dies too often ends the whole cluster with an error that quotes its
last lines.
"""

from __future__ import annotations

import importlib
import queue
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from geartrain.ams.observe import failpoints
from geartrain.ams.values.config import ClusterConfig, format_address, split_address
from geartrain.ams.values.errors import ConfigError, GeartrainError
from geartrain.launch import configuration
from geartrain.launch.child import Child
from geartrain.launch.ports import require_free
from geartrain.launch.role import KILL_AFTER_SECONDS

START_TIMEOUT_SECONDS = 60.0
MAX_RESTARTS = 5
"""Restarts of one role within RESTART_WINDOW_SECONDS; one more ends the cluster."""
RESTART_WINDOW_SECONDS = 600.0
_SCHEDULER, _DASHBOARD = "scheduler", "dashboard"


class ChildFailed(GeartrainError):
    """A role process exited by itself, or did not get ready in time."""


@dataclass(frozen=True)
class Ready:
    """Event: a child serves."""

    child: Child


@dataclass(frozen=True)
class Exited:
    """Event: a child has ended."""

    child: Child


@dataclass(frozen=True)
class ClusterFacts:
    """Addresses and process ids of a cluster that is ready."""

    scheduler: str
    """host:port of the scheduler."""
    shards: tuple[str, ...]
    """host:port of every shard, in order."""
    pids: dict[str, int]
    """Process id by role name."""
    more: dict[str, str]
    """host:port of every other role, by name."""
    metrics: dict[str, str] = field(default_factory=dict)
    """host:port of each role's metrics, by name of the role; only roles that have them."""
    dashboard: str | None = None
    """Link that opens the dashboard; None without one."""


class Launcher:
    """The processes of one cluster. A context manager: leaving it stops them all. Use it from the main thread."""

    def __init__(
        self,
        config: ClusterConfig,
        on_line: Callable[[str], None],
        more: Sequence[str] = (),
        *,
        restart: bool = True,
        dashboard: str | None = None,
    ) -> None:
        """Store the settings; :meth:`start` starts the processes.

        Args:
            config: settings of the whole cluster; each server gets its shards, and its own port if one is given.
            on_line: called with every log line of every child, on threads of their own.
            more: roles to start when all shards serve; allowed are those with ``in_up`` in the registry.
            restart: whether to restart roles that die.
            dashboard: host:port of a page that shows the cluster; None: no page. The cluster runs on if
                it dies.

        Raises:
            ConfigError: the shards cannot be divided among the servers, or several servers would share an address.
        """
        self._restarts_roles = restart
        self._num_servers = config.num_servers
        if config.server.advertise is not None and self._num_servers > 1:
            raise ConfigError(
                f"server.advertise is {config.server.advertise!r}, one address for {self._num_servers} servers; "
                "leave it out, or start the servers one by one with 'geartrain server'"
            )
        if config.server.ports is not None and self._num_servers > 1:
            raise ConfigError(
                f"server.ports is {list(config.server.ports)}, the ports of one server, for {self._num_servers} "
                "servers; leave it out, or start the servers one by one with 'geartrain server'"
            )
        self._server = config.server
        self._listen = {name: str(getattr(config, name).listen) for name in (_SCHEDULER, *more)}
        self._dashboard = dashboard
        self._on_line = on_line
        self._environ = configuration.to_environment(config)
        self._events: queue.SimpleQueue[Ready | Exited | signal.Signals] = queue.SimpleQueue()
        self._children: list[Child] = []
        self._restarts: dict[str, list[float]] = {}
        """Times at which each role was restarted, by name."""
        self._facts: dict[str, dict[str, Any]] = {}
        """Content of each role's last ready line, by name."""

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: self._events.put(signal.Signals(number)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):  # a second signal does not wait for snapshots
            signal.signal(number, lambda *_: self._kill())
        # Servers first: they can still sign off at the scheduler, and jobs take their snapshots.
        self._stop_children(self._children[1:], KILL_AFTER_SECONDS + self._server.leave_timeout_seconds)
        self._stop_children(self._children[:1], KILL_AFTER_SECONDS)

    def start(self) -> ClusterFacts | None:
        """Start every role; return once all shards serve, or with None if stopped meanwhile.

        Raises:
            ConfigError: a child cannot run with its settings, for example because its port is in use.
            ChildFailed: a child exited, or took longer than START_TIMEOUT_SECONDS.
        """
        for name, listen in self._listen.items():
            require_free(listen, f"--{name}-listen")
        if self._dashboard is not None:
            importlib.import_module("geartrain.watch.page")  # reports a missing library before roles start
            require_free(self._dashboard, "--dashboard-listen")
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        told = self._await_ready([self._spawn(_SCHEDULER, "scheduler")], deadline)
        if told is None:
            return None
        scheduler = str(told[0]["address"])
        servers = [self._spawn_server(index, scheduler) for index in range(self._num_servers)]
        told = self._await_ready(servers, deadline)
        if told is None:
            return None
        shards = tuple(address for facts in told for address in facts["addresses"])
        names = [name for name in self._listen if name != _SCHEDULER]
        told = self._await_ready([self._spawn(name, name, f"--scheduler={scheduler}") for name in names], deadline)
        if told is None:
            return None
        more = {name: str(facts["address"]) for name, facts in zip(names, told, strict=True)}
        page = None
        if self._dashboard is not None:
            places = {"scheduler": scheduler, "listen": self._dashboard, "graph": more.get("graph")}
            flags = [f"--{flag}={address}" for flag, address in places.items() if address is not None]
            told = self._await_ready([self._spawn(_DASHBOARD, _DASHBOARD, *flags)], deadline)
            if told is None:
                return None
            page = str(told[0]["url"])
        pids = {child.name: child.pid for child in self._children}
        said = {child.name: child.facts for child in self._children if child.facts is not None}
        metrics = {name: str(facts["metrics"]) for name, facts in said.items() if "metrics" in facts}
        return ClusterFacts(scheduler, shards, pids, more, metrics, page)

    def wait(self) -> None:
        """Serve until SIGTERM or SIGINT.

        Raises:
            ChildFailed: a role died that is not restarted, or for the MAX_RESTARTS + 1st time in
                RESTART_WINDOW_SECONDS.
        """
        while not isinstance(event := self._events.get(), signal.Signals):
            is_page = event.child.name == _DASHBOARD
            if isinstance(event, Exited):
                try:
                    if not self._restarts_roles:
                        raise _failure(event.child, f"ended by itself ({event.child.exit_text})")
                    self._restart(event.child)
                except ChildFailed as exc:
                    if not is_page:
                        raise
                    self._on_line(f"{_DASHBOARD} | {exc}\n{_DASHBOARD} | 'geartrain dashboard' shows another page")
            elif is_page and event.child.facts is not None:
                self._on_line(f"{_DASHBOARD} | open {event.child.facts['url']}: the link of before is good no more")

    def _restart(self, dead: Child) -> None:
        now = time.monotonic()
        recent = [at for at in self._restarts.get(dead.name, ()) if now - at < RESTART_WINDOW_SECONDS]
        if dead.facts is not None:
            self._facts[dead.name] = dead.facts
        if dead.name not in self._facts or len(recent) >= MAX_RESTARTS:
            times = f" for the {len(recent) + 1}th time in {RESTART_WINDOW_SECONDS / 60:g} minutes" if recent else ""
            raise _failure(dead, f"ended by itself ({dead.exit_text}){times}")
        self._restarts[dead.name] = [*recent, now]
        self._on_line(f"{dead.name} | ended by itself ({dead.exit_text}); starting it again")
        self._environ.pop(failpoints.VARIABLE, None)  # armed for the first life only, or every restart would fail again
        again = self._child(dead.name, self._arguments_again(dead))
        self._on_line(f"{dead.name} | is process {again.pid} now")
        self._children[self._children.index(dead)] = again

    def _arguments_again(self, dead: Child) -> list[str]:
        """Return the arguments of a role for its restart: the same, with the ports it had, by which others know it."""
        facts = self._facts[dead.name]
        again = {}
        if "metrics" in facts:
            again["--metrics"] = str(facts["metrics"])
        listens = {**self._listen, _DASHBOARD: self._dashboard}
        if (listen := listens.get(dead.name)) is not None:
            host, port = split_address(listen)[0], split_address(str(facts["address"]))[1]
            again["--listen"] = format_address(host, port)
        elif self._server.advertise is None:
            again["--ports"] = ",".join(str(split_address(str(address))[1]) for address in facts["addresses"])
        kept = [argument for argument in dead.arguments if argument.partition("=")[0] not in again]
        return [*kept, *(f"{flag}={value}" for flag, value in again.items())]

    def _spawn(self, name: str, *arguments: str) -> Child:
        child = self._child(name, arguments)
        self._children.append(child)
        return child

    def _child(self, name: str, arguments: Sequence[str]) -> Child:
        return Child(
            name,
            arguments,
            self._environ,
            on_line=self._on_line,
            on_ready=lambda child: self._events.put(Ready(child)),
            on_exit=lambda child: self._events.put(Exited(child)),
        )

    def _spawn_server(self, index: int, scheduler: str) -> Child:
        places = {"--listen": self._server.listen, "--metrics": self._server.metrics}
        return self._spawn(
            f"server {index}",
            "server",
            f"--scheduler={scheduler}",
            f"--shard={index * self._server.shards}",
            *(f"{flag}={next_address(first, index)}" for flag, first in places.items() if first is not None),
        )

    def _await_ready(self, children: Sequence[Child], deadline: float) -> list[dict[str, Any]] | None:
        """Return each child's ready facts, or None if stopped meanwhile."""
        awaited = set(children)
        while awaited:
            try:
                event = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise _failure(awaited.pop(), f"is not ready after {START_TIMEOUT_SECONDS:g} s") from None
            if isinstance(event, signal.Signals):
                return None
            if isinstance(event, Exited):
                if event.child.complaint is not None:
                    raise ConfigError(f"{event.child.name}: {event.child.complaint}")
                raise _failure(event.child, f"ended before it was ready ({event.child.exit_text})")
            awaited.discard(event.child)
        return [child.facts for child in children if child.facts is not None]

    def _kill(self) -> None:
        for child in self._children:
            child.kill()

    def _stop_children(self, children: Sequence[Child], seconds: float) -> None:
        for child in children:
            child.terminate()
        deadline = time.monotonic() + seconds
        for child in children:
            if child.stop(max(0.0, deadline - time.monotonic())):
                self._on_line(f"{child.name} | did not end within {seconds:g} s: killed")


def next_address(first: str, index: int) -> str:
    """Return the address ``first`` with its port raised by ``index``; port 0, any free one, stays."""
    host, port = split_address(first)
    return format_address(host, port and port + index)


def _failure(child: Child, what: str) -> ChildFailed:
    tail = "".join(f"\n  {line}" for line in child.tail) or "\n  (nothing)"
    return ChildFailed(f"{child.name} (pid {child.pid}) {what}; its last lines:{tail}")
