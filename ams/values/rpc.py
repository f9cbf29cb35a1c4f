"""What every request of an RPC is, whichever role it is for, and the one that all roles answer."""

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
    """A request of one RPC, whose reply is an ``R_co``: ``class Fence(Rpc[Done])`` asks for the RPC "Fence".

    A subclass is a frozen dataclass with the fields of the RPC's request message, and ``R_co`` one with those of its
    reply message: the codec follows from that (:mod:`geartrain.ams.rpc.services`). A reply message of one field
    may be that field's type, one of none is None. ``name`` is that of the RPC, where the class has another.
    """

    rpc_name: ClassVar[str]

    def __init_subclass__(cls, *, name: str | None = None) -> None:
        super().__init_subclass__()
        cls.rpc_name = name or cls.__name__


@dataclass(frozen=True, kw_only=True)
class Pong:
    """Reply to :class:`Ping`."""

    role: str
    """As its command is called: scheduler, server, graph or slowgear."""
    version: str
    """Of its build: see :func:`version`."""
    uptime_seconds: float
    """Since the role began."""
    incarnation: int
    """Which process of its shard or slow gear it is; 0: a role that has none, or none yet."""
    pid: int = 0
    """Of its process, on the machine where that runs; 0: not said."""
    metrics: str = ""
    """Where its process tells Prometheus what it counts, as "host:port" that it listens at; empty: nowhere."""


@dataclass(frozen=True, kw_only=True)
class Ping(Rpc[Pong]):
    """Ask a role who it is. It answers though it has not joined a cluster, or holds nothing any more."""


@functools.cache
def version() -> str:
    """Identity of the installed build, such as "0.1.0+1f2e3d4c": the package's version, and a hash of the sources of
    ``ams`` and of its compiled core.

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
