"""Ray actors of roles and training functions: one process each, which ends with its node's Ray daemon (it watches that)
and with the program that made the cluster."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray

from geartrain.ams.values.config import ClusterConfig
from geartrain.ams.values.errors import GeartrainError
from geartrain.launch.logs import log_to_stderr
from geartrain.launch.role import raise_open_files
from geartrain.ops import Role

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 1.0


class RoleActor:
    """A role that serves while the actor lives.

    Ray restarts an actor whose process died, but not one whose constructor failed: the constructor retries here. Only
    the very first failure is reported, to the caller of :meth:`facts`.
    """

    def __init__(
        self, title: str, name: str, config: ClusterConfig, host: str | None, port: int, settings: Mapping[str, Any]
    ) -> None:
        """Start the role at ``host``; None: at the address of its machine."""
        log_to_stderr("info")
        raise_open_files()
        self._title = title
        self._error: GeartrainError | None = None
        self._closing = False
        host = host or ray.util.get_node_ip_address()
        listen = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        while True:
            try:
                self._role = Role(name, config, **settings, listen=listen)
                break
            except GeartrainError as exc:
                if not ray.get_runtime_context().was_current_actor_reconstructed:
                    self._error = exc
                    return
                logger.warning("retrying in %g s: %s", _RETRY_SECONDS, exc)
                time.sleep(_RETRY_SECONDS)
        threading.Thread(target=self._watch, name="role-watch", daemon=True).start()

    def __repr__(self) -> str:
        return self._title  # prefix of each line of its log

    def facts(self) -> dict[str, Any]:
        """Return the content of its ready line. Raises the error with which it did not start."""
        if self._error is not None:
            raise type(self._error)(f"{self._title} on {socket.gethostname()}: {self._error}")
        return {**self._role.facts, "pid": os.getpid()}

    def node(self) -> str:
        """Return Ray's id of its node."""
        return str(ray.get_runtime_context().get_node_id())

    def close(self) -> None:
        """Shut the role down in order."""
        self._closing = True
        if self._error is None:
            self._role.close()

    def _watch(self) -> None:
        reason = self._role.wait()
        if not self._closing:
            logger.error("ended by itself: %s", reason)
            os._exit(1)  # Ray starts another


class WorkerActor:
    """A training process."""

    def __init__(self, rank: int, environ: Mapping[str, str]) -> None:
        """Set the environment of one rank from ``environ``."""
        log_to_stderr("info")
        self._rank = rank
        os.environ.pop("MASTER_PORT", None)  # from a torchrun that may have started this Ray
        os.environ.update(environ)

    def __repr__(self) -> str:
        return f"worker {self._rank}"

    def run(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        return function(*arguments)


def free_address(host: str | None, port: int) -> str:
    """Return host:port on this machine, with a free port in place of port 0."""
    host = host or ray.util.get_node_ip_address()
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        if port == 0:
            probe.bind((host, 0))
            port = probe.getsockname()[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
