"""``torchrun --rdzv-backend loopback``: ranks of one machine meet where no other machine reaches them.

torchrun's own way for one machine (``c10d``, with and without ``--standalone``) listens on every address and unpickles
what it finds there: whoever reaches the port runs code. Here there is nothing to unpickle (the agent is alone, its
place is known), and the store, gloo and NCCL listen on 127.0.0.1 alone.

torchrun imports this module by its entry point, while it sets itself up; nobody else does.
"""

from __future__ import annotations

import os
import socket

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.api import (
    RendezvousHandler,
    RendezvousHandlerCreator,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

from geartrain.workers.loopback import BACKEND

_HOST = "127.0.0.1"


class Loopback(RendezvousHandler):
    """The rendezvous of an agent that is alone: a new store for each start of its ranks."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        """Raise ValueError if there is to be more than one machine."""
        if parameters.max_nodes > 1:
            raise ValueError(f"--nnodes is {parameters.max_nodes}; --rdzv-backend {BACKEND} is for one machine")
        self._run_id = parameters.run_id

    def get_backend(self) -> str:
        """Return its name."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Whether ranks use the store of the agent: they do, and open none of their own."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Open a store; the one of an earlier start goes with what its ranks left there."""
        # TCPStore itself listens on all addresses.
        listener = socket.create_server((_HOST, 0))
        port = listener.getsockname()[1]
        store = TCPStore(_HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        # Ranks inherit it. gloo and NCCL listen where the machine's name leads, or a variable for several machines.
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
        return RendezvousInfo(PrefixStore("agent", store), 0, 1, RendezvousStoreInfo(_HOST, port))

    def is_closed(self) -> bool:
        """Never: nobody else could wait for it."""
        return False

    def set_closed(self) -> None:
        """Nothing to tell anybody."""

    def num_nodes_waiting(self) -> int:
        """No other machine joins."""
        return 0

    def get_run_id(self) -> str:
        """Return what ``--rdzv-id`` says."""
        return self._run_id

    def shutdown(self) -> bool:
        """Return that there is nothing left to close; the store goes with the agent."""
        return True


def handler() -> RendezvousHandlerCreator:
    """What torchrun asks this module for, by the entry point of its group ``torchrun.handlers``."""
    return Loopback
