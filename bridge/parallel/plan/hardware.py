"""Hardware of a training as data: the rates of the cost model. Given, published, read or measured."""

from __future__ import annotations

import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

import psutil
import torch
import yaml

from geartrain.ams.values.arguments import integer, path_name, real_number
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.text import counted, quoted
from geartrain.bridge.collectives.communicator import Communicator

_GBIT = 1e9 / 8

# Peaks of NVIDIA's data sheets (SXM forms; NVLink's bandwidth halved, for it counts both directions), and typical
# latencies of NVLink, Ethernet and InfiniBand.
_V100: Mapping[str, Any] = {
    "flops": {"float32": 15.7e12, "float64": 7.8e12, "float16": 125e12},
    "memory_bandwidth": 900e9,
    "memory_bytes": 32 * 10**9,
    "ranks_per_node": 8,
    "intra_node_bandwidth": 150e9,
    "intra_node_latency_seconds": 5e-6,
    "inter_node_latency_seconds": 3e-5,
    "operation_seconds": 5e-6,
    "device": "cuda",
}
_A100: Mapping[str, Any] = {
    **_V100,
    "flops": {"float32": 19.5e12, "float64": 9.7e12, "float16": 312e12, "bfloat16": 312e12},
    "memory_bandwidth": 1555e9,
    "memory_bytes": 40 * 10**9,
    "intra_node_bandwidth": 300e9,
}
_H200: Mapping[str, Any] = {
    **_V100,
    "flops": {"float32": 67e12, "float64": 34e12, "float16": 989e12, "bfloat16": 989e12},
    "memory_bandwidth": 4.8e12,
    "memory_bytes": 141 * 10**9,
    "intra_node_bandwidth": 450e9,
    "inter_node_bandwidth": 3200 * _GBIT,
    "inter_node_latency_seconds": 5e-6,
}
CLUSTERS: Final[Mapping[str, Mapping[str, Any]]] = {
    "v100-25gbit": {**_V100, "inter_node_bandwidth": 25 * _GBIT},
    "v100-35gbit": {**_V100, "memory_bytes": 16 * 10**9, "inter_node_bandwidth": 35 * _GBIT},
    "v100": _V100,
    "a100": _A100,
    "h200": _H200,
}


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Rates of one rank's device and of the links between ranks: data for :func:`auto_plan`, measured or given.

    :meth:`measure` measures this machine and process group, :meth:`named` knows those of published figures,
    :meth:`read` reads a file, ``dataclasses.replace`` changes a field. Raises InvalidArgument for a rate that is
    not above zero, and for a fraction outside [0, 1].
    """

    name: str
    """Name of the cluster, in reports."""
    flops: Mapping[str, float]
    """Floating-point operations a second of large matrix products, by dtype ("float32"); a multiplication and an
    addition are two. A missing dtype counts as float32."""
    memory_bandwidth: float
    """Bytes a second that an operation reads and writes together."""
    memory_bytes: int
    """Memory of a rank's device; on a CPU an even share of the machine's."""
    ranks_per_node: int = 1
    """Ranks connected by intra-node links."""
    intra_node_bandwidth: float = math.inf
    """Bytes a second that a rank sends to another of its node while it receives as many."""
    inter_node_bandwidth: float = math.inf
    """Bytes a second of a node's link in each direction; a ring crosses it once."""
    intra_node_latency_seconds: float = 0.0
    """Latency of a message between two ranks of a node, beside its bytes."""
    inter_node_latency_seconds: float = 0.0
    """Latency of a message between two nodes, beside its bytes."""
    operation_seconds: float = 0.0
    """Launch time of one operation, whatever its size."""
    device: str = "cpu"
    """Device of the tensors: "cpu" or "cuda"."""
    overlap: float = 1.0
    """Share of a hidden collective's time that does not slow the computation beside it: 1 if a network card works
    alone, 0 if the processors that compute also carry the bytes."""

    def __post_init__(self) -> None:
        """Check every field."""
        if not isinstance(self.name, str) or not self.name:
            raise InvalidArgument(f"name of a Hardware is {quoted(self.name)}; it must be a text")
        if not isinstance(self.flops, Mapping) or "float32" not in self.flops:
            raise InvalidArgument(
                f"flops is {quoted(self.flops)}; it must map dtypes to rates, 'float32' among them, as "
                "{'float32': 1e12}: that is the rate of dtypes not named"
            )
        rates = {name: getattr(self, name) for name in (*_BANDWIDTHS, "memory_bandwidth")}
        for name, rate in {**rates, **{f"flops[{dtype!r}]": rate for dtype, rate in self.flops.items()}}.items():
            if not real_number(name, rate) > 0:
                raise InvalidArgument(f"{name} is {rate!r}; it must be above zero")
        for name in (*_LATENCIES, "operation_seconds"):
            if not 0 <= real_number(name, getattr(self, name)) < math.inf:
                raise InvalidArgument(f"{name} is {getattr(self, name)!r}; it must be finite and >= 0")
        integer("memory_bytes", self.memory_bytes, 1)
        integer("ranks_per_node", self.ranks_per_node, 1)
        if not 0 <= real_number("overlap", self.overlap) <= 1:
            raise InvalidArgument(f"overlap is {self.overlap!r}; it must be from 0 to 1")
        if self.device not in ("cpu", "cuda"):
            raise InvalidArgument(f"device is {quoted(self.device)}; it must be 'cpu' or 'cuda'")

    def operation(self, flops: int, num_bytes: int, dtype: str) -> float:
        """Return the time of an operation: the longer of its arithmetic and its bytes (Williams et al., Roofline,
        2009)."""
        arithmetic = flops / self.flops.get(dtype, self.flops["float32"])
        return max(arithmetic, num_bytes / self.memory_bandwidth) + self.operation_seconds

    def link(self, ranks: int) -> tuple[float, float]:
        """Return bytes a second and latency in seconds of the slowest link in a ring of ``ranks``, node after node."""
        within = self.intra_node_bandwidth, self.intra_node_latency_seconds
        between = self.inter_node_bandwidth, self.inter_node_latency_seconds
        if ranks <= self.ranks_per_node:
            return within
        if self.ranks_per_node == 1:
            return between
        return min(within[0], between[0]), max(within[1], between[1])

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain values, without infinite rates."""
        return {key: value for key, value in asdict(self).items() if value != math.inf}

    def write(self, path: str | Path) -> None:
        """Write a YAML file for :meth:`read`."""
        Path(path).write_text(yaml.safe_dump(self.to_dict(), sort_keys=False), encoding="utf-8")

    @classmethod
    def read(cls, path: str | Path) -> Hardware:
        """Read a YAML or ``.json`` file. Raises InvalidArgument, which names the file, if it is invalid.

        YAML reads 1.0e+12 as a number, and 1e12 as a text.
        """
        name = path_name("path", path, "the name of a YAML or JSON file with the fields of a Hardware")
        try:
            text = Path(name).read_text(encoding="utf-8")
            values = json.loads(text) if Path(name).suffix == ".json" else yaml.safe_load(text)
        except (OSError, UnicodeDecodeError, json.JSONDecodeError, yaml.YAMLError) as exc:
            raise InvalidArgument(f"{str(name)!r} cannot be read as a file of a Hardware: {exc}") from exc
        if not isinstance(values, Mapping):
            raise InvalidArgument(f"{str(name)!r} holds no fields of a Hardware, as 'memory_bandwidth: 9.0e+11'")
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise InvalidArgument(
                f"{str(name)!r}: a Hardware has no field {unknown[0]!r}; its fields are {', '.join(sorted(known))}"
            )
        if missing := sorted({"name", "flops", "memory_bandwidth", "memory_bytes"} - set(values)):
            raise InvalidArgument(f"{str(name)!r}: a Hardware needs {', '.join(missing)}")
        try:
            return cls(**values)
        except InvalidArgument as exc:
            raise InvalidArgument(f"{str(name)!r}: {exc}") from exc

    @classmethod
    def named(cls, name: str) -> Hardware:
        """Return a published cluster: "v100-25gbit", "v100-35gbit", "v100", "a100", "h200"; else raise InvalidArgument.

        Rates are the peaks of data sheets, so that real steps take at least the expected time. The first three are the
        clusters of the 100-million-class paper, of Whale's documentation and of PLSC.
        """
        if name not in CLUSTERS:
            raise InvalidArgument(f"no hardware is named {quoted(name)}; there are {', '.join(CLUSTERS)}")
        return cls(name=name, **CLUSTERS[name])

    @classmethod
    def measure(
        cls, process_group: Any = None, *, device: torch.device | str | None = None, alone: bool = False
    ) -> Hardware:
        """Measure this machine and process group in a few seconds; every rank calls it and gets the slowest rank's
        rates.

        All ranks work at once, as in training. ``device``: of the tensors; None: the current CUDA device if there is
        one, else the CPU. ``alone``: measure this process without the others; links then count as free. Raises
        RankLost.
        """
        if device is None:
            device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
        device, link = torch.device(device), None if alone else Communicator(process_group)
        rates = _compute_rates(device, link)
        if link is None:
            return cls(name="one process, measured, as if links cost nothing", **rates)
        hosts: list[str] = link.gather_json(platform.node())
        rates["memory_bytes"] //= 1 if device.type == "cuda" else hosts.count(platform.node())
        rates["ranks_per_node"] = min(map(hosts.count, hosts))
        if link.world_size > 1:
            place = "intra" if len(set(hosts)) == 1 else "inter"
            rates |= {f"{place}_node_{what}": value for what, value in _link_rates(device, link).items()}
            rates["overlap"] = float(device.type == "cuda")
        every = link.gather_json(rates)
        slowest: dict[str, Any] = {
            key: (max if key.endswith("_seconds") else min)(of_rank[key] for of_rank in every)
            for key in rates
            if key != "flops"
        }
        slowest["flops"] = {dtype: min(of_rank["flops"][dtype] for of_rank in every) for dtype in rates["flops"]}
        return cls(
            name=f"{counted(link.world_size, 'rank')} on {counted(len(set(hosts)), 'host')}, measured", **slowest
        )


_BANDWIDTHS = ("intra_node_bandwidth", "inter_node_bandwidth")
_LATENCIES = ("intra_node_latency_seconds", "inter_node_latency_seconds")


def _seconds(call: Callable[[], object], device: torch.device, link: Communicator | None, repeats: int = 7) -> float:
    """Return the median time of a few calls that all ranks start together, after a warm-up call."""
    times = []
    for turn in range(repeats + 1):
        if turn == 1 and link is not None:
            link.barrier("measurement")
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def _compute_rates(device: torch.device, link: Communicator | None) -> dict[str, Any]:
    on_cuda = device.type == "cuda"
    large, tiny = torch.ones(16 << 20, device=device), torch.ones(8, device=device)
    size = 4_096 if on_cuda else 256
    flops = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16) if on_cuda else (torch.float32,):
        left = torch.ones(size, size, dtype=dtype, device=device)
        right = torch.ones(size, 4 * size, dtype=dtype, device=device)
        # The first products of a process may be a fifth slower than those of a long training.
        seconds = _seconds(lambda left=left, right=right: left @ right, device, link, 101)  # type: ignore[misc]
        flops[str(dtype).removeprefix("torch.")] = 8 * size**3 / seconds
    memory = torch.cuda.get_device_properties(device).total_memory if on_cuda else psutil.virtual_memory().total
    return {
        "flops": flops,
        "memory_bandwidth": 3 * large.nbytes / _seconds(lambda: large.add_(large), device, link),
        "operation_seconds": _seconds(lambda: [tiny.add_(1.0) for _ in range(200)], device, link) / 200,
        "memory_bytes": int(memory),
        "device": device.type,
    }


def _link_rates(device: torch.device, link: Communicator) -> dict[str, float]:
    few, many = torch.ones(link.world_size, 2, device=device), torch.ones(2 << 20, device=device)
    latency = _seconds(lambda: link.sum(few), device, link, 25) / math.ceil(math.log2(link.world_size))
    turns = 2 * (link.world_size - 1)
    seconds = _seconds(lambda: link.sum(many), device, link)
    bandwidth = turns / link.world_size * many.nbytes / max(seconds - turns * latency, 0.5 * seconds)
    return {"bandwidth": bandwidth, "latency_seconds": latency}
