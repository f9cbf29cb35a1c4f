"""What the graph service tells of its graphs."""

from __future__ import annotations

from dataclasses import dataclass


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
