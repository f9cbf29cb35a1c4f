"""What is asked of the graph service and what it replies: plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from geartrain.ams.values.rpc import Rpc
from geartrain.ams.values.specs import Ids


@dataclass(frozen=True, kw_only=True)
class GraphInfo:
    """A graph that is kept, and how old it is."""

    table: str
    table_incarnation: int = 0
    """Number of the table, which tells it from others of its name; 0: not known."""
    version: int
    """Counts the graphs of the table, from 1."""
    k: int
    """Wanted neighbours of a class; each has min(k, num_classes - 1)."""
    num_classes: int
    step: int
    """Training step of the rows, as the caller of the build said."""
    writes: int
    """Writes that the shards had applied to the table when the building began, summed over the shards."""
    fingerprint: str
    """XXH3 (128 bits, hexadecimal) of the unit rows it was built from."""
    built_unix_seconds: float
    whole_bytes: int
    shard_bytes: tuple[int, ...] = ()
    """Of the part of each shard, if the graph is cut to what each owns; empty if the cluster did not answer."""
    age_writes: int | None = None
    """Writes to the rows since; None: not known, for the table is gone or was made anew, or nobody answered."""


@dataclass(frozen=True, kw_only=True)
class GraphBuilding:
    """A build under way."""

    table: str
    k: int
    step: int
    done_pairs: int
    """Pairs of rows that were compared; 0 of 0: it waits for another build, or reads the rows."""
    total_pairs: int
    seconds: float
    """Since it began."""


@dataclass(frozen=True, kw_only=True)
class GraphBuilt:
    """A build that has ended well."""

    graph: GraphInfo
    resumed_pairs: int
    """Pairs of rows that were not compared again, for a build that was ended had kept them."""


@dataclass(frozen=True, kw_only=True)
class GraphsState:
    """All that a graph service has."""

    graphs: tuple[GraphInfo, ...]
    building: tuple[GraphBuilding, ...]


@dataclass(frozen=True, kw_only=True)
class BuildProgress:
    """One reply to :class:`BuildGraph`."""

    building: GraphBuilding | None = None
    built: GraphInfo | None = None
    """In the last one only."""
    resumed_pairs: int = 0
    """As of :class:`GraphBuilt`."""


@dataclass(frozen=True, kw_only=True)
class BuildGraph(Rpc[BuildProgress]):
    """Build the graph of a table anew from its rows: a reply now and then, the last one with ``built``."""

    table: str
    k: int
    step: int


@dataclass(frozen=True, kw_only=True)
class CancelBuild(Rpc[bool]):
    """End the build of a table; the reply says whether there was one."""

    table: str


@dataclass(frozen=True, kw_only=True)
class Selected:
    """Reply to :class:`SelectClasses`."""

    version: int
    """Of the graph that chose."""
    ids: Ids
    """The active classes, rising."""


@dataclass(frozen=True, kw_only=True)
class SelectClasses(Rpc[Selected]):
    """Choose the active classes of a batch."""

    table: str
    labels: Ids
    budget: int
    seed: int
    """An unsigned 64-bit integer, as is ``step``."""
    step: int
    version: int | None = None
    """The graph must be this one; None: whichever there is."""


@dataclass(frozen=True, kw_only=True)
class DescribeGraphs(Rpc[GraphsState]):
    """Ask for all graphs and builds."""


@dataclass(frozen=True, kw_only=True)
class DownloadGraph(Rpc[bytes]):
    """Ask for a whole graph, in chunks (:mod:`geartrain.ams.rpc.client.graph`)."""

    table: str


@dataclass(frozen=True, kw_only=True)
class ForgetGraph(Rpc[None]):
    """Drop the graph of a table, if there is one, and end its build."""

    table: str


@dataclass(frozen=True, kw_only=True)
class WriteGraphs(Rpc[tuple[str, ...]]):
    """Write graphs into the staging folder of a snapshot; the reply has the entries of the manifest, as JSON."""

    snapshot_id: str
    folder: str
    tables: Mapping[str, int]
    """Number of classes by name."""


@dataclass(frozen=True, kw_only=True)
class RestoreGraphs(Rpc[tuple[str, ...]]):
    """Take the graphs of tables from a snapshot; the reply has the tables that have one now."""

    folder: str
    tables: tuple[str, ...]
    incarnations: tuple[int, ...]
    """Of each, as it is restored."""
