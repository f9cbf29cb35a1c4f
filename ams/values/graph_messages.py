"""Requests to the graph service and its replies: plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from geartrain.ams.values.rpc import Rpc
from geartrain.ams.values.specs import Ids


@dataclass(frozen=True, kw_only=True)
class GraphInfo:
    """A stored graph and its age."""

    table: str
    table_incarnation: int = 0
    """Number of the table among those of its name; 0: not known."""
    version: int
    """Number of the graph among those of the table, from 1."""
    k: int
    """Requested neighbours of a class; each has min(k, num_classes - 1)."""
    num_classes: int
    step: int
    """Training step of the rows, as given with the build."""
    writes: int
    """Writes applied to the table when the build began, summed over the shards."""
    fingerprint: str
    """XXH3 (128 bits, hexadecimal) of the unit rows it was built from."""
    built_unix_seconds: float
    whole_bytes: int
    shard_bytes: tuple[int, ...] = ()
    """Bytes of each shard's part, if the graph is cut to the classes of each; empty if the cluster did not answer."""
    age_writes: int | None = None
    """Writes to the rows since; None: not known, as the table is gone or new, or the cluster did not answer."""


@dataclass(frozen=True, kw_only=True)
class GraphBuilding:
    """A build under way."""

    table: str
    k: int
    step: int
    done_pairs: int
    """Compared pairs of rows; 0 of 0: the build waits for another, or reads the rows."""
    total_pairs: int
    seconds: float
    """Seconds since the build began."""


@dataclass(frozen=True, kw_only=True)
class GraphBuilt:
    """A completed build."""

    graph: GraphInfo
    resumed_pairs: int
    """Pairs of rows that an interrupted build had saved, and that were not compared again."""


@dataclass(frozen=True, kw_only=True)
class GraphsState:
    """All graphs and builds of a graph service."""

    graphs: tuple[GraphInfo, ...]
    building: tuple[GraphBuilding, ...]


@dataclass(frozen=True, kw_only=True)
class BuildProgress:
    """Progress reply to :class:`BuildGraph`."""

    building: GraphBuilding | None = None
    built: GraphInfo | None = None
    """Set in the last reply only."""
    resumed_pairs: int = 0
    """Saved pairs, as of :class:`GraphBuilt`."""


@dataclass(frozen=True, kw_only=True)
class BuildGraph(Rpc[BuildProgress]):
    """Build the graph of a table anew from its rows: replies with progress, the last one with ``built``."""

    table: str
    k: int
    step: int


@dataclass(frozen=True, kw_only=True)
class CancelBuild(Rpc[bool]):
    """Cancel the build of a table; the reply is whether there was one."""

    table: str


@dataclass(frozen=True, kw_only=True)
class SelectedClasses:
    """Reply to :class:`SelectClasses`."""

    version: int
    """Version of the graph used."""
    ids: Ids
    """Active classes, ascending."""


@dataclass(frozen=True, kw_only=True)
class SelectClasses(Rpc[SelectedClasses]):
    """Choose the active classes of a batch."""

    table: str
    labels: Ids
    budget: int
    seed: int
    """Unsigned 64-bit integer, as is ``step``."""
    step: int
    version: int | None = None
    """Version required of the graph; None: any."""


@dataclass(frozen=True, kw_only=True)
class DescribeGraphs(Rpc[GraphsState]):
    """Ask for all graphs and builds."""


@dataclass(frozen=True, kw_only=True)
class DownloadGraph(Rpc[bytes]):
    """Ask for a whole graph, in chunks (:mod:`geartrain.ams.rpc.client.graph`)."""

    table: str


@dataclass(frozen=True, kw_only=True)
class ForgetGraph(Rpc[None]):
    """Drop the graph of a table, if there is one, and cancel its build."""

    table: str


@dataclass(frozen=True, kw_only=True)
class WriteGraphs(Rpc[tuple[str, ...]]):
    """Write graphs to the staging folder of a snapshot; the reply has the entries of the manifest, as JSON."""

    snapshot_id: str
    folder: str
    tables: Mapping[str, int]
    """Number of classes by name."""


@dataclass(frozen=True, kw_only=True)
class RestoreGraphs(Rpc[tuple[str, ...]]):
    """Load the graphs of tables from a snapshot; the reply has the tables that have one now."""

    folder: str
    tables: tuple[str, ...]
    incarnations: tuple[int, ...]
    """Incarnation of each restored table."""
