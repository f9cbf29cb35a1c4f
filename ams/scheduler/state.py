"""Durable state of a scheduler: read from its store at the start, written there before a request is answered.

A new cluster's bucket map is made here, once; its rows are placed by it from then on.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import xxhash

from geartrain.ams.observe import failpoints
from geartrain.ams.storage.kv.store import KeyValueStore
from geartrain.ams.values.errors import ConfigError, StateDamaged
from geartrain.ams.values.placement import BucketMap, even_placement, placement_from_bytes, placement_to_bytes
from geartrain.ams.values.specs import TableSpec
from geartrain.ams.values.text import other_format

FORMAT = 1
_LONGEST_NAME_BYTES = 300


@dataclass
class Member:
    """The process that holds a shard."""

    address: str
    incarnation: int
    left: bool = False
    newcomer: bool = True
    """Joined without a past: it holds no rows that an earlier scheduler knew of."""
    last_heartbeat: float = 0.0
    """Time of the last heartbeat, on the scheduler's clock. This and the following fields are not stored."""
    heartbeat_seconds: float = 0.0
    """Seconds between its heartbeats; 0: not known."""
    has_heartbeat: bool = True
    """Whether this scheduler process has received a registration or heartbeat of it."""
    memory_pool: str = ""
    """Name of the memory pool of its rows; empty: not known."""
    clock_ahead_seconds: float = 0.0
    """Lead of its clock over the scheduler's, less the travel time of a heartbeat."""
    version: str = ""
    """Its version of Geartrain; empty: not known."""
    is_leaving: bool = False
    """Whether it is shutting down, and waits for the snapshots of running jobs."""


@dataclass
class Schema:
    """A table of the cluster."""

    spec: TableSpec
    holders: dict[int, int] = field(default_factory=dict)
    """Incarnation of each shard that holds the table."""
    is_unsettled: bool = False
    """Being made or dropped: any number of shards may hold it."""
    for_restore: bool = False
    """Being restored from a snapshot, and unsettled until it is published."""


class State:
    """Cluster version, members, schemas and placement, as last stored. Not thread-safe."""

    def __init__(self, store: KeyValueStore, num_shards: int) -> None:
        """Read the state, or create one. Raises ConfigError, StateDamaged."""
        self._store = store
        self.cluster_version = 1
        self.members: dict[int, Member] = {}
        self.schemas: dict[str, Schema] = {}
        values = store.read_all()
        if values:
            self.bucket_map = self._read(values, num_shards)
        else:
            self.bucket_map = BucketMap(1, even_placement(num_shards))
            placed = base64.b64encode(placement_to_bytes(self.bucket_map.bucket_shards)).decode()
            store.write(
                {
                    "cluster": _json(format=FORMAT, num_shards=num_shards),
                    "version": _json(cluster_version=1),
                    "placement": _json(bucket_shards=placed, version=self.bucket_map.version),
                }
            )

    def commit(
        self,
        *,
        cluster_version: int | None = None,
        members: Mapping[int, Member] | None = None,
        schemas: Mapping[str, Schema | None] | None = None,
    ) -> None:
        """Write these changes (None: remove) at once, then publish them. Raises StateFailed: nothing has changed."""
        members, schemas = members or {}, schemas or {}
        changes: dict[str, bytes | None] = {}
        if cluster_version is not None and cluster_version != self.cluster_version:
            changes["version"] = _json(cluster_version=cluster_version)
        for shard, member in members.items():
            changes[f"member/{shard:04}"] = _json(
                shard=shard,
                address=member.address,
                incarnation=member.incarnation,
                left=member.left,
                newcomer=member.newcomer,
            )
        for name, schema in schemas.items():
            changes[key_of("schema", name)] = None if schema is None else _schema_json(schema)
        if changes:
            failpoints.reach("state.write.before")
            self._store.write(changes)
            failpoints.reach("state.write.after")
        self.cluster_version = cluster_version or self.cluster_version
        self.members.update(members)
        for name, schema in schemas.items():
            if schema is None:
                self.schemas.pop(name, None)
            else:
                self.schemas[name] = schema

    def _read(self, values: Mapping[str, bytes], num_shards: int) -> BucketMap:
        """Load the stored values, and return the bucket map that placed the rows."""
        cluster = _parsed("cluster", values.get("cluster"))
        if cluster["format"] != FORMAT:
            raise ConfigError(
                f"the scheduler's state {other_format(cluster['format'], FORMAT)}, or give an empty data folder"
            )
        if cluster["num_shards"] != num_shards:
            raise ConfigError(
                f"num_shards is {num_shards}, but the scheduler's state is that of a cluster with "
                f"num_shards {cluster['num_shards']}; start it with that, or give an empty data folder"
            )
        self.cluster_version = int(_parsed("version", values.get("version"))["cluster_version"])
        placed = _parsed("placement", values.get("placement"))
        try:
            bucket_shards = placement_from_bytes(base64.b64decode(placed["bucket_shards"]))
        except ValueError as exc:
            raise StateDamaged(f"key 'placement' of the scheduler's state is no bucket map: {exc}") from exc
        for key, value in values.items():
            kind = key.partition("/")[0]
            if kind == "member":
                fields = _parsed(key, value)
                shard = int(fields.pop("shard"))
                self.members[shard] = Member(**fields, has_heartbeat=False)
            elif kind == "schema":
                fields = _parsed(key, value)
                spec = TableSpec.from_dict(
                    fields["spec"] | {"incarnation": fields["incarnation"], "altered": fields["altered"]}
                )
                holders = {int(shard): incarnation for shard, incarnation in fields["holders"].items()}
                self.schemas[spec.name] = Schema(spec, holders, fields["is_unsettled"], fields["for_restore"])
        return BucketMap(placed["version"], bucket_shards)


def key_of(kind: str, name: str) -> str:
    """Return the key of something named by a user. Long names are cut and told apart by their hash."""
    encoded = name.encode()
    if len(encoded) <= _LONGEST_NAME_BYTES:
        return f"{kind}/{name}"
    return f"{kind}/{encoded[:100].decode(errors='ignore')}…{xxhash.xxh3_128_hexdigest(encoded)}"


def _schema_json(schema: Schema) -> bytes:
    return _json(
        spec=schema.spec.to_dict(),
        incarnation=schema.spec.incarnation,
        altered=schema.spec.altered,
        holders=schema.holders,
        is_unsettled=schema.is_unsettled,
        for_restore=schema.for_restore,
    )


def _json(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def _parsed(key: str, value: bytes | None) -> dict[str, Any]:
    if value is None:
        raise StateDamaged(f"the scheduler's state has no key {key!r}; give a copy of the folder, or an empty one")
    fields: dict[str, Any] = json.loads(value)
    return fields
