"""The rendezvous of ranks on one machine, as torchrun's agent uses it."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler


def parameters(**changes: Any) -> RendezvousParameters:
    return RendezvousParameters(**{"backend": "loopback", "endpoint": "", "run_id": "run", "min_nodes": 1, **changes})


def test_each_start_of_the_ranks_finds_an_empty_store_and_the_earlier_one_closed() -> None:
    handler = get_rendezvous_handler(parameters(max_nodes=1))
    ports = []
    for _ in range(2):
        meeting = handler.next_rendezvous()
        told = meeting.bootstrap_store_info
        assert told is not None and told.master_addr == "127.0.0.1"
        rank = TCPStore(told.master_addr, told.master_port, is_master=False)
        assert not rank.check(["address of rank 0"])
        rank.set("address of rank 0", "somewhere")
        ports.append(told.master_port)
        del rank, meeting
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", ports[0]))


def test_several_machines_do_not_meet_on_loopback() -> None:
    with pytest.raises(ValueError, match="--nnodes is 2"):
        get_rendezvous_handler(parameters(max_nodes=2))
