"""Several processes that serve one port: each has the models mapped, and a change goes to all of them.

This process holds the port, where workers listen, and answers nobody. Each worker has a socket to it, for lines of
JSON: a worker passes on what was wished of it, all are told, and all say what came of it. A worker ends when that
socket does; one that dies is started anew, and first told what the others said of their models.
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
from geartrain.serving.service import Told, all_or_none

logger = logging.getLogger(__name__)

START_SECONDS = 120.0
DRAIN_SECONDS = 8.0
"""For what is under way when a service is told to end; who stops containers waits for 10 s."""
_WISH_SECONDS = 300.0
"""For all workers to do what is wished: one may load a model."""
_MOST_RESTARTS, _RESTART_SECONDS = 5, 600.0
_LOOK_SECONDS = 1.0
_CHANGES_NOTHING = ("counts", "state", "following")
"""Wishes, of the versions that are served."""
_GONE: Told = {"error": InternalError.__name__, "message": "a worker died meanwhile", "is_gone": True}


class WorkerDied(GeartrainError):
    """A worker of a service ended although nobody told it to, again and again."""


class Lines:
    """One end of a socket for lines of JSON. Sending is thread-safe."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._file, self._lock = connection, connection.makefile("rb"), threading.Lock()

    def send(self, message: Mapping[str, Any]) -> None:
        """Raises OSError: the other end is gone."""
        with self._lock:
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any] | None:
        """The next message; None: there comes no other."""
        with contextlib.suppress(OSError, ValueError):
            if line := self._file.readline():
                message: dict[str, Any] = json.loads(line)
                return message
        return None

    def close(self) -> None:
        """The other end notices."""
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
        with contextlib.suppress(OSError):  # it ended at once, which is noticed below
            self.lines.send({"config": config.model_dump(mode="json"), "models": models})
        self.ready: queue.SimpleQueue[Told] = queue.SimpleQueue()
        self.was_ready = False
        self.answers: dict[int, queue.SimpleQueue[Told]] = {}
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
    """The workers of one service, started with it and ended by their own handles."""

    def __init__(self, config: ClusterConfig) -> None:
        """Start them; all are ready when this returns.

        Raises ConfigError (others have the port), and what the first worker says that cannot be.
        """
        self._ports = contextlib.ExitStack()
        self.address = self._reserve_port(config.serve.listen, "--listen")
        """host:port of HTTP."""
        self.grpc = None if config.serve.grpc is None else self._reserve_port(config.serve.grpc, "--grpc")
        """host:port of gRPC, if it is to be there."""
        there = {"listen": self.address, "grpc": self.grpc}
        self._config = config = config.model_copy(update={"serve": config.serve.model_copy(update=there)})
        self._ids = itertools.count()
        self._one_wish = threading.Condition()
        """Notified when one was done."""
        self._models: dict[str, Any] = {}
        """What workers say of their models since the last change."""
        self._is_ending = False
        self._starting = threading.Lock()
        """Held while one is started: none is once it is ending."""
        self._restarts: list[float] = []
        self.end_reason: str | None = None
        self.ended_all = threading.Event()
        self._workers = {number: _Worker(number, config, self) for number in range(config.serve.workers)}
        try:
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

    def everywhere(self, wish: Mapping[str, Any]) -> list[Told]:
        """Have every worker do it, or none, one wish after the other; return what each said."""
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
        """Block until all have ended."""
        self.ended_all.wait()

    def stop(self, grace_seconds: float) -> None:
        """Let each answer what is under way, and end within another second."""
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
        """A worker that served has ended: start another in its place, unless that was of no use again and again."""
        if not worker.was_ready:
            return
        why = f"ended with code {worker.process.returncode}"
        with self._one_wish:  # no change between what others say of their models and what the new one is told
            while not self._is_ending:
                now = time.monotonic()
                self._restarts = [at for at in self._restarts if at > now - _RESTART_SECONDS] + [now]
                if len(self._restarts) > _MOST_RESTARTS:
                    times = f"{len(self._restarts)} times in {_RESTART_SECONDS:g} s"
                    self.end_reason = f"its workers ended {times}; at last worker {worker.number} {why}"
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
                            self.end_reason = f"worker {worker.number} {why}"
                            self.ended_all.set()
                            return
                        self._one_wish.wait(_LOOK_SECONDS)
                except GeartrainError as exc:
                    why = f"did not start: {exc}"

    def _replies(self, workers: list[_Worker], wish: Mapping[str, Any]) -> list[Told]:
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
    def _answer(worker: _Worker, waits: queue.SimpleQueue[Told], until: float) -> Told:
        """Its answer. One that is stopped, or gives none, is ended: another takes its place."""
        while True:
            with contextlib.suppress(queue.Empty):
                return waits.get(timeout=_LOOK_SECONDS)
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
