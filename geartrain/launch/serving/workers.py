"""Several worker processes behind one port: each maps the models, and a change goes to all of them.

This process holds the port but answers no request: the workers listen on it. A control socket to each worker carries
lines of JSON: a worker forwards a request for a change, all workers receive it, and all answer. A worker ends when its
socket closes; one that dies is replaced, and the new one first receives the state of the others' models.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from geartrain.ams.values.config import ClusterConfig, format_address, split_address
from geartrain.ams.values.errors import GeartrainError, InternalError, NotServed, error_named
from geartrain.serving.http.ports import held_port
from geartrain.serving.service import WorkerReply, all_or_none

logger = logging.getLogger(__name__)

START_SECONDS = 120.0
DRAIN_SECONDS = 8.0
"""Time for requests in progress at shutdown; container runtimes wait 10 s before they kill."""
_WISH_SECONDS = 300.0
"""Time for all workers to carry out a request: it may load a model."""
_MAX_RESTARTS, _RESTART_SECONDS = 5, 600.0
_POLL_SECONDS = 1.0
_CHANGES_NOTHING = ("counts", "state", "following")
"""Requests that leave the served versions as they are."""
_GONE: WorkerReply = {"error": InternalError.__name__, "message": "a worker died meanwhile", "is_gone": True}


class WorkerDied(GeartrainError):
    """A worker of a service died repeatedly without being told to stop."""


class Lines:
    """One end of a socket that carries lines of JSON. Sending is thread-safe."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._file, self._lock = connection, connection.makefile("rb"), threading.Lock()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message. Raises OSError if the peer is gone."""
        with self._lock:
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any] | None:
        """Return the next message; None at the end of the stream."""
        with contextlib.suppress(OSError, ValueError):
            if line := self._file.readline():
                message: dict[str, Any] = json.loads(line)
                return message
        return None

    def close(self) -> None:
        """Close the connection; the peer sees the end of the stream."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._file.close()
        self._connection.close()


class _Worker:
    def __init__(
        self,
        number: int,
        config: ClusterConfig,
        workers: Workers,
        models: Mapping[str, Any] | None = None,
    ) -> None:
        self.number = number
        mine, theirs = socket.socketpair()
        level = logging.getLevelName(logging.getLogger().getEffectiveLevel()).lower()
        with theirs:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "geartrain.launch.serving.worker",
                    str(theirs.fileno()),
                    level,
                    str(number),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self.lines = Lines(mine)
        with contextlib.suppress(OSError):  # a worker that ended at once is noticed below
            self.lines.send({"config": config.model_dump(mode="json"), "models": models})
        self.ready: queue.SimpleQueue[WorkerReply] = queue.SimpleQueue()
        self.was_ready = False
        self.answers: dict[int, queue.SimpleQueue[WorkerReply]] = {}
        self._workers = workers
        self.thread = threading.Thread(target=self._listen, name=f"worker-{number}", daemon=True)
        self.thread.start()

    @property
    def is_stopped(self) -> bool:
        """Whether a signal stopped its process, as SIGSTOP does."""
        try:
            return os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return False

    def _listen(self) -> None:
        while (message := self.lines.receive()) is not None:
            if "ready" in message:
                self.ready.put(message)
            elif "wish" in message:
                threading.Thread(target=self._wished, args=(message,), daemon=True).start()
            elif (waits := self.answers.pop(message["id"], None)) is not None:
                waits.put(message["told"])
        self.ready.put(_GONE)
        for waits in list(self.answers.values()):
            waits.put(_GONE)
        self.process.wait()
        self._workers.ended(self)

    def _wished(self, message: Mapping[str, Any]) -> None:
        told = self._workers.everywhere(message["wish"])
        with contextlib.suppress(OSError):
            self.lines.send({"id": message["id"], "all": told})


class Workers:
    """The workers of one service: started with it, and stopped by it."""

    def __init__(self, config: ClusterConfig) -> None:
        """Start the workers; returns once all are ready.

        Raises ConfigError (another process has the port), WorkerDied, and the first worker's error about its settings.
        """
        self._ports = contextlib.ExitStack()
        self.address = self._reserve_port(config.serve.listen, "--listen")
        """host:port of HTTP."""
        self.grpc = None if config.serve.grpc is None else self._reserve_port(config.serve.grpc, "--grpc")
        """host:port of gRPC; None without it."""
        there = {"listen": self.address, "grpc": self.grpc}
        self._config = config = config.model_copy(update={"serve": config.serve.model_copy(update=there)})
        self._ids = itertools.count()
        self._one_wish = threading.Condition()
        """Notified when a request is done; its lock allows one at a time."""
        self._models: dict[str, Any] = {}
        """State of the models as the workers reported it at the last change."""
        self._is_ending = False
        self._starting = threading.Lock()
        """Held while a worker starts; no worker starts once the service stops."""
        self._restarts: list[float] = []
        self.stop_reason: str | None = None
        self.ended_all = threading.Event()
        self._workers: dict[int, _Worker] = {}
        try:
            for number in range(config.serve.workers):
                self._workers[number] = _Worker(number, config, self)
            for worker in list(self._workers.values()):
                self._require_ready(worker)
            self._record_models()
        except BaseException:
            self.stop(0)
            raise

    def _reserve_port(self, listen: str, flag: str) -> str:
        try:
            held = self._ports.enter_context(held_port(listen, flag))
        except BaseException:
            self._ports.close()
            raise
        return format_address(split_address(listen)[0], held.getsockname()[1])

    def everywhere(self, wish: Mapping[str, Any]) -> list[WorkerReply]:
        """Have every worker carry out a request, or none of them, one request at a time; return each answer."""
        with self._one_wish:
            tell = functools.partial(self._replies, list(self._workers.values()))
            if wish["wish"] in _CHANGES_NOTHING:
                if wish["wish"] == "following" and wish["model"] in self._models:
                    self._models[wish["model"]]["following"] = wish["facts"]
                return tell(wish)
            told = all_or_none(tell, wish, self._models)
            self._record_models()
            self._one_wish.notify_all()
            return told

    def _record_models(self) -> None:
        told = self._replies(list(self._workers.values()), {"wish": "state"})
        self._models = next((answer["said"] for answer in told if "said" in answer), self._models)

    def wait(self) -> None:
        """Block until all workers have ended."""
        self.ended_all.wait()

    def stop(self, grace_seconds: float) -> None:
        """Let each worker answer its requests in progress, and stop within another second."""
        with self._starting:
            self._is_ending = True
        self._ports.close()
        workers = list(self._workers.values())
        for worker in workers:
            worker.process.terminate()
        until = time.monotonic() + grace_seconds + 1
        for worker in workers:
            try:
                worker.process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
            worker.lines.close()
            if worker.thread is not threading.current_thread():
                worker.thread.join()
        self.ended_all.set()

    def ended(self, worker: _Worker) -> None:
        """Replace a worker that served and has ended, unless workers die too often."""
        if not worker.was_ready:
            return
        why = f"ended with code {worker.process.returncode}"
        # no change may come between the others' report of their models and the new worker's start from it
        with self._one_wish:
            while not self._is_ending:
                now = time.monotonic()
                self._restarts = [at for at in self._restarts if at > now - _RESTART_SECONDS] + [now]
                if len(self._restarts) > _MAX_RESTARTS:
                    times = f"{len(self._restarts)} times in {_RESTART_SECONDS:g} s"
                    self.stop_reason = f"its workers ended {times}; at last worker {worker.number} {why}"
                    self.ended_all.set()
                    return
                logger.warning("worker %d %s; another is started", worker.number, why)
                models = self._models
                with self._starting:
                    if self._is_ending:
                        return
                    another = self._workers[worker.number] = _Worker(worker.number, self._config, self, models or None)
                try:
                    self._require_ready(another)
                    return
                except NotServed as exc:
                    self._restarts.pop()
                    why = f"cannot serve what the others did: {exc}"
                    logger.error("worker %d %s; it is started when they serve another version", worker.number, why)
                    while self._models is models and not self._is_ending:
                        if all(other.process.poll() is not None for other in self._workers.values()):
                            self.stop_reason = f"worker {worker.number} {why}"
                            self.ended_all.set()
                            return
                        self._one_wish.wait(_POLL_SECONDS)
                except GeartrainError as exc:
                    why = f"did not start: {exc}"

    def _replies(self, workers: list[_Worker], wish: Mapping[str, Any]) -> list[WorkerReply]:
        number = next(self._ids)
        waiting = [(worker, worker.answers.setdefault(number, queue.SimpleQueue())) for worker in workers]
        for worker, waits in waiting:
            try:
                worker.lines.send({"id": number, "do": wish})
            except OSError:
                waits.put(_GONE)
        until = time.monotonic() + _WISH_SECONDS
        return [self._answer(worker, waits, until) for worker, waits in waiting]

    @staticmethod
    def _answer(worker: _Worker, waits: queue.SimpleQueue[WorkerReply], until: float) -> WorkerReply:
        """Return the worker's answer. A worker that is stopped or does not answer is killed and replaced."""
        while True:
            with contextlib.suppress(queue.Empty):
                return waits.get(timeout=_POLL_SECONDS)
            if worker.is_stopped or time.monotonic() > until:
                logger.warning("worker %d is stopped, or did not answer for long; it is killed", worker.number)
                worker.process.kill()
                return _GONE

    @staticmethod
    def _require_ready(worker: _Worker) -> None:
        try:
            told = worker.ready.get(timeout=START_SECONDS)
        except queue.Empty:
            raise WorkerDied(f"worker {worker.number} was not ready after {START_SECONDS:g} s") from None
        if "error" in told:
            raise error_named(told["error"])(told["message"])
        worker.was_ready = True
