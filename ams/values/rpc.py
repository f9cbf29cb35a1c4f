"""Base of all RPC requests, and the ping that all roles answer."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

import xxhash

R_co = TypeVar("R_co", covariant=True)


class Rpc(Generic[R_co]):
    """Base of a request of one RPC with a reply ``R_co``: ``class Fence(Rpc[Done])`` is the request of the RPC "Fence".

    A subclass is a frozen dataclass with the fields of the RPC's request message, and ``R_co`` one with those of its
    reply message: the codec follows from that (:mod:`geartrain.ams.rpc.services`). A reply message of one field may be
    that field's type; one without fields is None. ``name`` is the RPC's, if it differs from the class's.
    """

    rpc_name: ClassVar[str]

    def __init_subclass__(cls, *, name: str | None = None) -> None:
        super().__init_subclass__()
        cls.rpc_name = name or cls.__name__


@dataclass(frozen=True, kw_only=True)
class Pong:
    """Reply to :class:`Ping`."""

    role: str
    """Name of the role's command: scheduler, server, graph or slowgear."""
    version: str
    """Build of the role: see :func:`version`."""
    uptime_seconds: float
    """Seconds since the role started."""
    incarnation: int
    """Incarnation of its shard or slow gear; 0: a role that has none, or none yet."""
    pid: int = 0
    """Process id on its machine; 0: unknown."""
    metrics: str = ""
    """Address "host:port" of its Prometheus metrics; empty: none."""


@dataclass(frozen=True, kw_only=True)
class Ping(Rpc[Pong]):
    """Ask for the identity of a role. It answers even before it joins a cluster, and without shards."""


@functools.cache
def version() -> str:
    """Return the identity of the installed build, such as "0.1.0+1f2e3d4c": the package's version, and a hash of the
    sources of ``ams`` and of its compiled core.

    Reads about 4 MB, once a process: 10 ms.
    """
    try:
        release = importlib.metadata.version("geartrain")
    except importlib.metadata.PackageNotFoundError:  # run from its folder
        release = "unknown"
    ams = Path(__file__).parents[1]
    files = {path.relative_to(ams).as_posix(): path for path in ams.rglob("*.py")}
    if (core := importlib.util.find_spec("geartrain.ams.kernels._core")) is not None and core.origin is not None:
        files["core"] = Path(core.origin)  # beside the sources, or where an editable installation has it
    digest = xxhash.xxh3_64()
    for name, path in sorted(files.items()):
        content = path.read_bytes()
        digest.update(f"{name} {len(content)} ".encode())
        digest.update(content)
    return f"{release}+{digest.hexdigest()[:8]}"
