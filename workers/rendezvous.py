"""``torchrun --rdzv-backend loopback``: rendezvous of one machine's ranks that no other machine can reach.

torchrun's own rendezvous for one machine (``c10d``, with and without ``--standalone``) listens on every address and
unpickles its input: whoever reaches the port runs code. Here nothing is unpickled (the agent is alone, its place is
known), and the store, gloo and NCCL listen on 127.0.0.1 alone.

torchrun imports this module by its entry point during its setup; nothing else does.
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
    """Rendezvous of a single agent: a new store for each start of its ranks."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        """Raise ValueError for more than one machine."""
        if parameters.max_nodes > 1:
            raise ValueError(f"--nnodes is {parameters.max_nodes}; --rdzv-backend {BACKEND} is for one machine")
        self._run_id = parameters.run_id

    def get_backend(self) -> str:
        """Return the name of the backend."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Whether ranks use the store of the agent, instead of opening one of their own: they do."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Open a store; that of an earlier start is closed with its content."""
        # TCPStore itself listens on all addresses.
        listener = socket.create_server((_HOST, 0))
        port = listener.getsockname()[1]
        store = TCPStore(_HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        # Ranks inherit it. gloo and NCCL listen at the machine's name, or as a variable for several machines says.
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
        return RendezvousInfo(PrefixStore("agent", store), 0, 1, RendezvousStoreInfo(_HOST, port))

    def is_closed(self) -> bool:
        """Return False: no other agent could wait for it."""
        return False

    def set_closed(self) -> None:
        """Do nothing: there is no other agent."""

    def num_nodes_waiting(self) -> int:
        """Return 0: no other machine joins."""
        return 0

    def get_run_id(self) -> str:
        """Return the value of ``--rdzv-id``."""
        return self._run_id

    def shutdown(self) -> bool:
        """Return True: nothing is left to close, as the store goes with the agent."""
        return True


def handler() -> RendezvousHandlerCreator:
    """Return the handler's constructor, for the entry point in torchrun's group ``torchrun.handlers``."""
    return Loopback
