"""Polls the scheduler each second for revoked tokens, for a role without heartbeats."""

from __future__ import annotations

import logging
import threading

from geartrain.ams.rpc.carrier import AttemptFailed
from geartrain.ams.rpc.client.calls import GrpcCalls
from geartrain.ams.rpc.services import SCHEDULER
from geartrain.ams.rpc.tokens import Tokens
from geartrain.ams.values.errors import GeartrainError
from geartrain.ams.values.scheduler_messages import ReadRevoked

logger = logging.getLogger(__name__)

_ASK_SECONDS = 1.0
_TIMEOUT_SECONDS = 2.0


class RevokedWatch:
    """Thread that asks the scheduler at an address for revoked tokens, while tokens are required."""

    def __init__(self, tokens: Tokens | None, scheduler: str) -> None:
        """``tokens`` are those of a role; None: it has no certificates, and nothing is asked."""
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        if tokens is None:
            return
        self._tokens, self._is_silent = tokens, False
        self._calls = GrpcCalls(SCHEDULER, "scheduler", scheduler)
        self._fetch()
        self._thread = threading.Thread(target=self._run, name="geartrain-revoked", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop asking. Idempotent."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._calls.close()

    def _run(self) -> None:
        while not self._ended.wait(_ASK_SECONDS):
            self._fetch()

    def _fetch(self) -> None:
        try:
            if self._tokens.are_wanted:
                self._tokens.add_revoked(self._calls.call(ReadRevoked(known=self._tokens.heard), _TIMEOUT_SECONDS))
            self._is_silent = False
        except (GeartrainError, AttemptFailed) as exc:
            if not self._is_silent:
                logger.warning("cannot ask for revoked tokens, keeping the earlier list: %s", exc)
            self._is_silent = True
