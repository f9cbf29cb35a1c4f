"""What runs in actors of Ray: roles, and the functions that train. A process each, which ends with Ray's daemon there
(it watches that) and with the program that made the cluster."""

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
    """A role, which serves for as long as the actor lives.

    Ray starts an actor again whose process died, but not one whose constructor failed: that is tried again here. Only
    the very first failure is told, to whoever waits for :meth:`facts`.
    """

    def __init__(
        self, title: str, name: str, config: ClusterConfig, host: str | None, port: int, settings: Mapping[str, Any]
    ) -> None:
        """Start the role at ``host``, None: at the address of its machine."""
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
                logger.warning("tries again in %g s: %s", _RETRY_SECONDS, exc)
                time.sleep(_RETRY_SECONDS)
        threading.Thread(target=self._watch, name="role-watch", daemon=True).start()

    def __repr__(self) -> str:
        return self._title  # before each line of its log

    def facts(self) -> dict[str, Any]:
        """What its ready line would say. Raises the error with which it did not start."""
        if self._error is not None:
            raise type(self._error)(f"{self._title} on {socket.gethostname()}: {self._error}")
        return {**self._role.facts, "pid": os.getpid()}

    def node(self) -> str:
        """The number of Ray for the node where it is."""
        return str(ray.get_runtime_context().get_node_id())

    def close(self) -> None:
        """End the role in good order."""
        self._closing = True
        if self._error is None:
            self._role.close()

    def _watch(self) -> None:
        reason = self._role.wait()
        if not self._closing:
            logger.error("ended by itself: %s", reason)
            os._exit(1)  # Ray starts another


class WorkerActor:
    """A process that trains."""

    def __init__(self, rank: int, environ: Mapping[str, str]) -> None:
        """Be one rank of those that ``environ`` tells of."""
        log_to_stderr("info")
        self._rank = rank
        os.environ.pop("MASTER_PORT", None)  # of a torchrun that this Ray may be under
        os.environ.update(environ)

    def __repr__(self) -> str:
        return f"worker {self._rank}"

    def run(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Call it."""
        return function(*arguments)


def free_address(host: str | None, port: int) -> str:
    """host:port on the machine where this runs; at port 0 one that is free."""
    host = host or ray.util.get_node_ip_address()
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        if port == 0:
            probe.bind((host, 0))
            port = probe.getsockname()[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
