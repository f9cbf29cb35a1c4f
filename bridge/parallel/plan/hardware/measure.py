"""The rates of this machine and process group, measured in seconds with all ranks at work at once."""

from __future__ import annotations

import math
import platform
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from geartrain.ams.values.text import counted
from geartrain.bridge.collectives.communicator import Communicator, time_limit
from geartrain.bridge.parallel.plan.costs.collectives import Kind, sent_bytes
from geartrain.bridge.parallel.plan.costs.dry_link import DryLink
from geartrain.bridge.parallel.plan.costs.trace import StepTrace

_MIB = 1 << 20
_LARGE, _SMALL = 64 * _MIB, _MIB // 4
_CACHE_SIZES = (_SMALL, _MIB, 4 * _MIB, 16 * _MIB)
_LINK_BYTES = 8 * _MIB
_REPEATS = 7
_WARM_REPEATS = 101
"""Of products: the first ones of a process may be a fifth slower than what a training settles at."""


def measured_fields(process_group: Any, device: torch.device | str | None, *, alone: bool) -> dict[str, Any]:
    """Those of a ``Hardware``; see its ``measure``."""
    link = DryLink(1, StepTrace()) if alone else Communicator(process_group)
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
    clock = _Clock(link, torch.device(device))
    hosts: list[str] = link.gather_json(platform.node())
    per_node = min(hosts.count(host) for host in hosts)
    rates: dict[str, Any] = {**_compute_rates(clock), "ranks_per_node": per_node}
    rates["memory_bytes"] = _memory_bytes(clock.device, hosts.count(platform.node()))
    if link.world_size > 1:
        of_group = _link_rates(clock, link)
        rates["collective_bandwidth"] = of_group.pop("by_kind")
        place = "intra" if len(set(hosts)) == 1 else "inter"
        rates |= {f"{place}_node_{what}": value for what, value in of_group.items()}
        if place == "inter" and per_node > 1:
            here = _link_of_host(hosts, time_limit(process_group))
            within = _link_rates(clock, here)
            rates |= {f"intra_node_{what}": within[what] for what in ("bandwidth", "latency_seconds")}
        rates["overlap"] = _overlap(clock, link)
    rates = _of_slowest(link.gather_json(rates))
    name = f"{counted(link.world_size, 'rank')} on {counted(len(set(hosts)), 'host')}, measured"
    if alone:
        name = "one process, measured, as if links cost nothing"
    return {"name": name, **rates}


class _Clock:
    """Times calls that all ranks make at once."""

    def __init__(self, link: Communicator, device: torch.device) -> None:
        self._link = link
        self.device = device

    def seconds(self, call: Callable[[], object], repeats: int = _REPEATS) -> float:
        """The median of a few, after one that does not count."""
        self._timed(call)
        self._link.agree(True)  # all begin together
        return statistics.median(self._timed(call) for _ in range(repeats))

    def _timed(self, call: Callable[[], object]) -> float:
        start = time.perf_counter()
        call()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - start

    def ones(self, num_bytes: int) -> Tensor:
        """A float32 tensor of so many bytes."""
        return torch.ones(num_bytes // 4, device=self.device)


def _compute_rates(clock: _Clock) -> dict[str, Any]:
    in_place = {size: _bandwidth(clock, size) for size in (*_CACHE_SIZES, _LARGE)}
    large = in_place.pop(_LARGE)
    cached = statistics.median(in_place[size] for size in _CACHE_SIZES[:2])
    in_cache = [size for size in _CACHE_SIZES if in_place[size] > math.sqrt(cached * large)] if cached > large else []
    one, other = clock.ones(_LARGE), clock.ones(_LARGE)
    fresh = clock.seconds(lambda: torch.add(one, other)) - 3 * _LARGE / large
    logits = torch.ones(16, 16_384, device=clock.device)
    tiny = torch.ones(8, device=clock.device)
    begin = clock.seconds(lambda: [tiny.add_(1.0) for _ in range(200)]) / 200
    soft = clock.seconds(lambda: torch.log_softmax(logits, 1)) - begin
    return {
        "flops": _product_rates(clock),
        "memory_bandwidth": large,
        "cache_bytes": 3 * max(in_cache, default=0),
        "cache_bandwidth": cached if in_cache else None,
        "fresh_bandwidth": _LARGE / fresh if fresh > 0.1 * _LARGE / large else None,
        "exponentials": logits.numel() / max(soft, 1e-9),
        "operation_seconds": begin,
    }


def _bandwidth(clock: _Clock, size: int) -> float:
    one, other = clock.ones(size), clock.ones(size)
    turns = max(1, 4 * _MIB // size)
    return 3 * size * turns / clock.seconds(lambda: [one.add_(other) for _ in range(turns)])


def _product_rates(clock: _Clock) -> dict[str, float]:
    """Of matrices as a class head multiplies: a batch of 64 by 8,192 rows of 256."""
    dtypes = (torch.float32, torch.float16, torch.bfloat16) if clock.device.type == "cuda" else (torch.float32,)
    size = 4_096 if clock.device.type == "cuda" else 256
    rates = {}
    for dtype in dtypes:
        left = torch.ones(size, size, dtype=dtype, device=clock.device)
        right = torch.ones(size, 4 * size, dtype=dtype, device=clock.device)
        seconds = clock.seconds(lambda left=left, right=right: left @ right, _WARM_REPEATS)  # type: ignore[misc]
        rates[str(dtype).removeprefix("torch.")] = 8 * size**3 / seconds
    return rates


def _link_rates(clock: _Clock, link: Communicator) -> dict[str, Any]:
    ranks = link.world_size
    few, many = torch.ones(ranks, 2, device=clock.device), torch.ones(_LINK_BYTES // 4, device=clock.device)
    rows = many.view(ranks, -1) if many.numel() % ranks == 0 else many[: many.numel() // ranks * ranks].view(ranks, -1)
    latency = clock.seconds(lambda: link.sum(few), 25) / math.ceil(math.log2(ranks))
    calls: dict[Kind, Callable[[], object]] = {
        "all-reduce": lambda: link.sum(rows),
        "all-gather": lambda: link.gather(rows[:1], [1] * ranks),
        "reduce-scatter": lambda: link.sum_to_owners(rows, [1] * ranks),
    }
    by_kind = {}
    for kind, call in calls.items():
        turns = (2 if kind == "all-reduce" else 1) * (ranks - 1)
        seconds = clock.seconds(call)
        by_kind[kind] = sent_bytes(kind, rows.nbytes, ranks) / max(seconds - turns * latency, 0.5 * seconds)
    return {"bandwidth": by_kind["all-reduce"], "latency_seconds": latency, "by_kind": by_kind}


def _link_of_host(hosts: list[str], limit: timedelta | None) -> Communicator:
    """The ranks of this host; every rank takes part in making each host's group."""
    own = None
    for host in dict.fromkeys(hosts):
        group = dist.new_group([rank for rank, other in enumerate(hosts) if other == host], limit)
        if host == platform.node():
            own = group
    return Communicator(own)


def _overlap(clock: _Clock, link: Communicator) -> float:
    """What part of a collective's time is free when it goes on beside a computation that takes as long."""
    rows = torch.ones(link.world_size, _LINK_BYTES // 4 // link.world_size, device=clock.device)
    side = torch.ones(256, 256, device=clock.device)
    alone = clock.seconds(lambda: link.start_gather(rows[:1], [1] * link.world_size).result())
    turns = max(1, round(alone / max(clock.seconds(lambda: side @ side), 1e-9)))
    turns = max(one for (one,) in link.exchange([turns]))

    def compute() -> None:
        for _ in range(turns):
            torch.mm(side, side)

    def both() -> None:
        pending = link.start_gather(rows[:1], [1] * link.world_size)
        compute()
        pending.result()

    computing, together = clock.seconds(compute), clock.seconds(both)
    return min(1.0, max(0.0, (alone + computing - together) / min(alone, computing)))


def _memory_bytes(device: torch.device, ranks_here: int) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(psutil.virtual_memory().total) // ranks_here


def _of_slowest(said: list[dict[str, Any]]) -> dict[str, Any]:
    """Rates that every rank reaches: the lowest, of latencies the highest."""
    joint: dict[str, Any] = {}
    for key, value in said[0].items():
        values = [one[key] for one in said]
        if isinstance(value, dict):
            joint[key] = {name: min(one[name] for one in values) for name in value}
        elif None in values:
            joint[key] = None
        else:
            joint[key] = max(values) if key.endswith("_seconds") else min(values)
    return joint
