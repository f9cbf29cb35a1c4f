"""``torchrun --rdzv-backend geartrain --rdzv-endpoint SCHEDULER``: rendezvous of several machines' ranks by the
scheduler.

The protocol is torch's for elastic jobs; so is the numbering of machines, by their addresses: a machine that stays
keeps its number. But the state of torch's own rendezvous is a pickle behind an open port: whoever reaches it runs code.
Here it is JSON at the scheduler, which requires a certificate of the cluster, and so is the store of the agents; no
agent opens a port. Ranks have a store there, too: ``bridge/collectives/scheduler_store.py``.

torchrun imports this module by its entry point during its setup; nothing else does.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import astuple
from datetime import datetime, timedelta
from typing import Any

import torch
from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousHandlerCreator,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
)

from geartrain.ams.client.jobs.rendezvous import RendezvousValues
from geartrain.ams.values.errors import GeartrainError
from geartrain.bridge.collectives.scheduler_store import VARIABLE, SchedulerStore, ranks_key
from geartrain.workers.loopback import BY_SCHEDULER

try:
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
        DynamicRendezvousHandler,
        RendezvousSettings,
        RendezvousTimeout,
        _BackendRendezvousStateHolder,
        _NodeDesc,
        _RendezvousState,
    )
except ImportError as exc:  # part of it is private
    raise ImportError(
        f"torch {torch.__version__} has another rendezvous than those that 'torchrun --rdzv-backend geartrain' was "
        f"tried with (torch 2.10 to 2.13; {exc}); install one of these, or let ranks of one machine meet by 'loopback'"
    ) from exc

logger = logging.getLogger(__name__)

_STATE = "rendezvous"


class ByScheduler(DynamicRendezvousHandler):
    """Rendezvous of one agent with those of its job."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        """Raise ConfigError if the endpoint is no address, or the folder of certificates is not valid."""
        names = ("join", "last_call", "close", "heartbeat")
        timeouts = {name: parameters.get_as_int(f"{name}_timeout") for name in names}
        settings = RendezvousSettings(
            parameters.run_id,
            parameters.min_nodes,
            parameters.max_nodes,
            RendezvousTimeout(**{name: timedelta(seconds=of) for name, of in timeouts.items() if of is not None}),
            timedelta(seconds=parameters.get_as_int("keep_alive_interval", 5) or 5),
            parameters.get_as_int("keep_alive_max_attempt", 3) or 3,
        )
        # torch would open a store of its own for the ranks, on all addresses.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        self._scheduler = parameters.endpoint
        values = RendezvousValues(parameters.endpoint, parameters.run_id)
        self._shared = SharedState(values, settings)
        self._job_store = SchedulerStore(values)
        node = self._node_desc_generator.generate(parameters.local_addr)
        super().__init__(node, settings, BY_SCHEDULER, self._job_store, self._shared)

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other agents; name a store for this start of the ranks.

        Ranks find it by MASTER_PORT, set at each start: processes of a forkserver have the variables of its first
        start.
        """
        os.environ[VARIABLE] = f"{self._scheduler}/{self.get_run_id()}"
        meeting = super().next_rendezvous()
        if meeting.rank == 0:
            assert meeting.bootstrap_store_info is not None
            name = secrets.token_hex(8)
            self._job_store.set(ranks_key(meeting.bootstrap_store_info.master_port), name)
            meeting.store.set("ranks", name)
        name = f"{self.get_run_id()}/{meeting.store.get('ranks').decode()}"
        self._shared.store(RendezvousValues(self._scheduler, name))
        return meeting

    def num_nodes_waiting(self) -> int:
        """Return the number of agents that wait to join; 0, so that ranks train on, if the scheduler does not
        answer."""
        try:
            return super().num_nodes_waiting()
        except RendezvousConnectionError as exc:
            logger.warning("whether more machines wait to join is unknown: %s", exc)
            return 0


class SharedState(_BackendRendezvousStateHolder):
    """Rendezvous state shared by all agents, as JSON at the scheduler. Used by one handler, under its locks."""

    def __init__(self, values: RendezvousValues, settings: RendezvousSettings) -> None:
        super().__init__(None, settings)  # type: ignore[arg-type]  # only sync would ask it
        self._values = values
        self._ranks: RendezvousValues | None = None
        self._version = 0
        self._known: bytes | None = None
        self._ended_version: int | None = None
        """Version of the state that an earlier torchrun of this id left."""

    def store(self, ranks: RendezvousValues) -> None:
        """Keep these values at the scheduler while the state is used, and drop earlier ones."""
        if self._ranks is not None:
            self._ranks.close()
        self._ranks = ranks

    def sync(self) -> bool | None:
        """Write the state if it was changed here, else read it; return whether it was written."""
        if not self._dirty and 0 <= time.monotonic() - self._last_sync_time < self._cache_duration:
            return None
        try:
            was_dirty = self._dirty
            if was_dirty:
                found, was_written = self._values.write(_STATE, _encoded(self._state), expected=self._version)
            else:
                (found,), was_written = self._values.read([_STATE]), False
            if found.value is None and self._known is not None:  # the scheduler was restarted
                found, _ = self._values.write(_STATE, self._known, expected=0)
            if self._ranks is not None:
                self._ranks.read([_STATE])
        except GeartrainError as exc:
            raise RendezvousConnectionError(str(exc)) from exc
        state = None if found.value is None else _decoded(found.value)
        if state is not None and state.closed and self._known is None:
            self._ended_version = found.version
        if state is None or found.version == self._ended_version:
            state = _RendezvousState()
            state.round = secrets.randbits(40)  # tells keys of an earlier torchrun apart
        else:
            self._known = found.value
        self._state, self._version = state, found.version
        self._dirty, self._last_sync_time = False, time.monotonic()
        self._sanitize()
        return was_written if was_dirty else None


def _encoded(state: _RendezvousState) -> bytes:
    said = {
        "round": state.round,
        "complete": state.complete,
        "deadline": None if state.deadline is None else state.deadline.isoformat(),
        "closed": state.closed,
        "participants": [[astuple(node), rank] for node, rank in state.participants.items()],
        "wait_list": [astuple(node) for node in state.wait_list],
        "redundancy_list": [astuple(node) for node in state.redundancy_list],
        "last_heartbeats": [[astuple(node), at.isoformat()] for node, at in state.last_heartbeats.items()],
    }
    return json.dumps(said).encode()


def _decoded(said: bytes) -> _RendezvousState:
    """Decode a state. Raises RendezvousStateError."""
    state = _RendezvousState()
    try:
        read = json.loads(said)
        state.round, state.complete, state.closed = int(read["round"]), bool(read["complete"]), bool(read["closed"])
        state.deadline = None if read["deadline"] is None else datetime.fromisoformat(read["deadline"])
        state.participants = {_node(node): int(rank) for node, rank in read["participants"]}
        state.wait_list = set(map(_node, read["wait_list"]))
        state.redundancy_list = set(map(_node, read["redundancy_list"]))
        state.last_heartbeats = {_node(node): datetime.fromisoformat(at) for node, at in read["last_heartbeats"]}
    except (ValueError, TypeError, KeyError) as exc:
        raise RendezvousStateError(f"the state of the rendezvous is damaged: {exc!r}") from exc
    return state


def _node(said: Sequence[Any]) -> _NodeDesc:
    address, pid, local_id = said
    return _NodeDesc(str(address), int(pid), int(local_id))


def handler() -> RendezvousHandlerCreator:
    """Return the handler's constructor, for the entry point in torchrun's group ``torchrun.handlers``."""
    return ByScheduler
