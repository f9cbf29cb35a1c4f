"""What training runs on, as data: the rates that the cost model divides by."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from geartrain.ams.values.arguments import integer, path_name, real_number
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.text import quoted
from geartrain.bridge.parallel.plan.hardware.clusters import CLUSTERS
from geartrain.bridge.parallel.plan.hardware.measure import measured_fields
from geartrain.bridge.parallel.split.kept_memory import GLIBC_FRESH_BYTES

_RATES = ("memory_bandwidth", "intra_node_bandwidth", "inter_node_bandwidth")
_OPTIONAL_RATES = ("cache_bandwidth", "fresh_bandwidth", "exponentials")
_SECONDS = ("intra_node_latency_seconds", "inter_node_latency_seconds", "operation_seconds")


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Rates of one rank's device and of the links between ranks: data for :func:`auto_plan`, measured or given.

    :meth:`measure` measures this machine and process group, :meth:`named` knows those of published figures,
    :meth:`read` reads a file, ``dataclasses.replace`` changes a field. Raises InvalidArgument for a rate that is
    not above zero, and for a fraction outside [0, 1].
    """

    name: str
    """Of the cluster, in reports."""
    flops: Mapping[str, float]
    """Floating-point operations a second that large matrix products reach, by dtype ("float32"); a multiplication and
    an addition are two. A dtype that is not there counts as float32."""
    memory_bandwidth: float
    """Bytes a second of an operation over tensors that fit no cache: what it reads and what it writes together."""
    memory_bytes: int
    """Of a rank's device; on a CPU what the ranks of a machine have, shared evenly."""
    ranks_per_node: int = 1
    """Ranks whose links are the intra-node ones."""
    intra_node_bandwidth: float = math.inf
    """Bytes a second that a rank sends to another of its node while it gets as many."""
    inter_node_bandwidth: float = math.inf
    """Bytes a second of the link of a node in each direction; a ring crosses it once."""
    intra_node_latency_seconds: float = 0.0
    """Of a message between two ranks of a node, beside its bytes."""
    inter_node_latency_seconds: float = 0.0
    """Of a message between two nodes, beside its bytes."""
    collective_bandwidth: Mapping[str, float] = field(default_factory=dict)
    """Bytes a second in a ring's formula by kind of collective ("reduce-scatter"), where a library reaches other rates
    than the link's."""
    cache_bytes: int = 0
    """An operation whose tensors are smaller together works at ``cache_bandwidth``."""
    cache_bandwidth: float | None = None
    """Bytes a second of such an operation; None: as ``memory_bandwidth``."""
    fresh_bytes: int = GLIBC_FRESH_BYTES
    """Results of at least so many bytes lie in memory that is asked for anew each time."""
    fresh_bandwidth: float | None = None
    """Bytes a second at which such memory is first written; None: as other memory, where an allocator keeps it."""
    exponentials: float | None = None
    """Exponentials (logarithms, tanh) a second; None: as fast as memory."""
    operation_seconds: float = 0.0
    """What beginning one operation takes, whatever its size."""
    overlap: float = 1.0
    """Part of the time of a hidden collective that costs the computation beside it nothing: 1 where a network card
    works alone, 0 where processors carry the bytes that should compute."""

    def __post_init__(self) -> None:
        """Check every field."""
        if not isinstance(self.name, str) or not self.name:
            raise InvalidArgument(f"name of a Hardware is {quoted(self.name)}; it must be a text")
        for kind in ("flops", "collective_bandwidth"):
            rates = getattr(self, kind)
            if not isinstance(rates, Mapping):
                raise InvalidArgument(f"{kind} is {quoted(rates)}; it must map names to rates, as {{'float32': 1e12}}")
            for key, rate in rates.items():
                _positive(f"{kind}[{key!r}]", rate)
        if "float32" not in self.flops:
            raise InvalidArgument(f"flops has {sorted(self.flops)}; it needs 'float32', the rate of dtypes not named")
        for name in _RATES:
            _positive(name, getattr(self, name))
        for name in _OPTIONAL_RATES:
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))
        for name in _SECONDS:
            if not 0 <= real_number(name, getattr(self, name)) < math.inf:
                raise InvalidArgument(f"{name} is {getattr(self, name)!r}; it must be finite and >= 0")
        integer("memory_bytes", self.memory_bytes, 1)
        integer("ranks_per_node", self.ranks_per_node, 1)
        integer("cache_bytes", self.cache_bytes, 0)
        integer("fresh_bytes", self.fresh_bytes, 1)
        if not 0 <= real_number("overlap", self.overlap) <= 1:
            raise InvalidArgument(f"overlap is {self.overlap!r}; it must be from 0 to 1")

    def flops_of(self, dtype: str) -> float:
        """Rate of products of ``dtype``; that of float32 where it is not known."""
        return self.flops.get(dtype, self.flops["float32"])

    def link(self, ranks: int) -> tuple[float, float]:
        """Bytes a second and seconds of latency of the slowest link in a ring of ``ranks``, node after node."""
        if ranks <= self.ranks_per_node:
            return self.intra_node_bandwidth, self.intra_node_latency_seconds
        if self.ranks_per_node == 1:
            return self.inter_node_bandwidth, self.inter_node_latency_seconds
        bandwidth = min(self.intra_node_bandwidth, self.inter_node_bandwidth)
        return bandwidth, max(self.intra_node_latency_seconds, self.inter_node_latency_seconds)

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values; infinite rates are left out."""
        return {key: value for key, value in asdict(self).items() if value not in (math.inf, None)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Hardware:
        """Of plain values, as :meth:`to_dict` gives them. Raises InvalidArgument for a field it does not have."""
        known = {one.name for one in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise InvalidArgument(f"a Hardware has no field {unknown[0]!r}; its fields are {', '.join(sorted(known))}")
        missing = {"name", "flops", "memory_bandwidth", "memory_bytes"} - set(values)
        if missing:
            raise InvalidArgument(f"a Hardware needs {', '.join(sorted(missing))}; given: {', '.join(sorted(values))}")
        return cls(**values)

    def write(self, path: str | Path) -> None:
        """Write it to a YAML file, which :meth:`read` reads."""
        Path(path).write_text(yaml.safe_dump(self.to_dict(), sort_keys=False), encoding="utf-8")

    @classmethod
    def read(cls, path: str | Path) -> Hardware:
        """Of a YAML file, or of a ``.json`` one. Raises InvalidArgument, which names the file, for one that is none.

        YAML takes 1.0e+12 for a number, and 1e12 for a text.
        """
        name = path_name("path", path, "the name of a YAML or JSON file with the fields of a Hardware")
        try:
            text = Path(name).read_text(encoding="utf-8")
            values = json.loads(text) if Path(name).suffix == ".json" else yaml.safe_load(text)
        except (OSError, UnicodeDecodeError, json.JSONDecodeError, yaml.YAMLError) as exc:
            raise InvalidArgument(f"{str(name)!r} cannot be read as a file of a Hardware: {exc}") from exc
        if not isinstance(values, Mapping):
            raise InvalidArgument(f"{str(name)!r} holds no fields of a Hardware, as 'memory_bandwidth: 9.0e+11'")
        try:
            return cls.from_dict(values)
        except InvalidArgument as exc:
            raise InvalidArgument(f"{str(name)!r}: {exc}") from exc

    @classmethod
    def named(cls, name: str) -> Hardware:
        """A cluster of published figures: "v100-25gbit", "v100-35gbit", "v100", "a100", "h200"; InvalidArgument else.

        Rates are the peaks of data sheets, so that an expected step is one that real ones come near from above. The
        first three are the clusters of the 100-million-class paper, of Whale's documentation and of PLSC.
        """
        if name not in CLUSTERS:
            raise InvalidArgument(f"no hardware is named {quoted(name)}; there are {', '.join(CLUSTERS)}")
        return cls(name=name, **CLUSTERS[name])

    @classmethod
    def measure(
        cls, process_group: Any = None, *, device: torch.device | str | None = None, alone: bool = False
    ) -> Hardware:
        """Of this machine and process group, in a few seconds; every rank calls it, all get the slowest rank's rates.

        All ranks work at once, as in training. ``device``: where tensors are; None: the current CUDA device if there
        is one, else the CPU. ``alone``: measure this process without the others, who are not asked; links then count
        as if they cost nothing. Raises RankLost.
        """
        return cls(**measured_fields(process_group, device, alone=alone))

    def with_ranks_per_node(self, ranks_per_node: int) -> Hardware:
        """The same with another number of ranks on each node."""
        return replace(self, ranks_per_node=ranks_per_node)


def _positive(name: str, value: object) -> None:
    if not real_number(name, value) > 0:
        raise InvalidArgument(f"{name} is {value!r}; it must be above zero")
