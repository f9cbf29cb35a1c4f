"""One "machine" of a test: torchrun's agent at an address, whose ranks sum their numbers, and one breaks at first.

``rendezvous_host.py SCHEDULER JOB ADDRESS HOSTS BREAKS``: BREAKS is the rank that kills itself at the first start.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys

import torch
import torch.distributed as dist
from torch.distributed.elastic.rendezvous.registry import handler_registry
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from geartrain.bridge.collectives.communicator import Communicator
from geartrain.bridge.collectives.scheduler_store import init_process_group
from geartrain.workers.scheduler_rendezvous import ByScheduler


def rank(breaks: int) -> tuple[int, int, int, float, bool]:
    """Train one step of a linear layer with the other ranks."""
    starts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    init_process_group("gloo")
    dist.barrier()  # the others are connected, too
    if starts == 0 and dist.get_rank() == breaks:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.manual_seed(0)
    layer = torch.nn.Linear(2, 1, bias=False)
    layer(torch.full((1, 2), float(dist.get_rank()))).sum().backward()
    assert layer.weight.grad is not None
    dist.all_reduce(layer.weight.grad)
    group = dist.new_group(backend="gloo")  # which asks the store again
    dist.barrier(group)
    agreed = Communicator().share(dist.get_rank()) == 0
    told = dist.get_rank(), int(os.environ["GROUP_RANK"]), starts, float(layer.weight.grad[0, 0]), agreed
    dist.destroy_process_group()
    return told


def main(scheduler: str, job: str, address: str, hosts: str, breaks: str) -> None:
    """Print what the ranks of this machine told."""
    if "geartrain" not in handler_registry._registry:  # an installation that is older than its entry point
        handler_registry.register("geartrain", ByScheduler)
    # Ranks are forked by a process that has imported, once.
    multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.integration.security.rendezvous_host"])
    config = LaunchConfig(
        min_nodes=int(hosts),
        max_nodes=int(hosts),
        nproc_per_node=1,
        max_restarts=8,  # a rank that meets another that leaves counts, too
        rdzv_backend="geartrain",
        rdzv_endpoint=scheduler,
        rdzv_configs={"timeout": 60},
        run_id=job,
        local_addr=address,
        start_method="forkserver",
        monitor_interval=0.1,
    )
    from tests.integration.security.rendezvous_host import rank as by_name  # not of __main__

    print(json.dumps(elastic_launch(config, by_name)(int(breaks))))


if __name__ == "__main__":
    main(*sys.argv[1:])
