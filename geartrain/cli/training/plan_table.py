"""``geartrain plan --ids``: the memory of a hashed table, and whether the hosts have it."""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from dataclasses import asdict
from typing import Any

from pydantic import ByteSize, TypeAdapter, ValidationError

from geartrain.ams.server.machine import default_row_memory
from geartrain.ams.tables.planned_memory import MAX_IDS, PlannedRows, planned_rows
from geartrain.ams.values.config import MIB
from geartrain.ams.values.errors import ConfigError
from geartrain.ams.values.placement import MAX_SHARDS
from geartrain.ams.values.specs import TableSpec
from geartrain.ams.values.text import counted, sized

_PARTS = {
    "rows": "their values",
    "slots": "the optimizer's",
    "counters": "of updates",
    "lives": "when seen, and how often",
    "index": "where each id is",
    "growth": "of the index, not yet given back",
    "admission": "ids that wait",
}


def print_table_plan(spec: TableSpec, ids: float, hosts: int, shards: int, memory: str, as_json: bool) -> None:
    """Print the bytes of a table of ``ids`` rows on the fullest shard and host, and whether they fit.

    Raises ConfigError for numbers that cannot be right.
    """
    host_bytes = bytes_of(memory)
    if not 1 <= ids <= MAX_IDS * MAX_SHARDS:
        raise ConfigError(f"--ids is {ids:g}; it must be from 1 to {MAX_IDS * MAX_SHARDS:,}, what all shards can hold")
    ids = int(ids)
    if not 1 <= hosts <= shards <= MAX_SHARDS:
        raise ConfigError(f"--shards is {shards} and --hosts {hosts}; a host has a shard or more, up to {MAX_SHARDS}")
    here, room = -(-shards // hosts), default_row_memory(host_bytes)  # shards of the fullest host

    def peak(number: int, of: int) -> float:
        return here * planned_rows(spec, number, of).peak if number <= MAX_IDS * of else math.inf

    planned = planned_rows(spec, ids, shards)
    fewest = next((count for count in range(1, MAX_SHARDS // here + 1) if peak(ids, count * here) <= room), None)
    most = bisect_left(range(1, MAX_IDS * shards + 1), True, key=lambda number: peak(number, shards) > room)
    facts: dict[str, Any] = {
        "ids": ids,
        "shards": shards,
        "hosts": hosts,
        "shard_bytes": asdict(planned) | {"total": planned.total},
        "host_bytes": here * planned.peak,
        "host_room_bytes": room,
        "fits": peak(ids, shards) <= room,
        "hosts_needed": fewest,
        "max_ids": most,
    }
    print(json.dumps(facts) if as_json else _text(spec, planned, facts))


def _text(spec: TableSpec, planned: PlannedRows, facts: dict[str, Any]) -> str:
    a_shard = facts["ids"] / facts["shards"]
    lines = [
        f"{facts['ids']:,} ids of width {spec.dim}, {spec.dtype}, {spec.optimizer.name}; "
        f"{counted(facts['shards'], 'shard')} on {counted(facts['hosts'], 'host')}",
        "",
    ]
    for name, what in _PARTS.items():
        if part := getattr(planned, name):
            lines.append(f"shard  {name:<9}  {sized(part):>11}  {part / a_shard:6.1f} bytes a row  {what}")
    lines += [
        f"shard  {'together':<9}  {sized(planned.total):>11}  {planned.total / a_shard:6.1f} bytes a row",
        f"shard  {'at most':<9}  {sized(planned.peak):>11}  on the way there, while its index grows",
        "",
        f"host   {sized(facts['host_bytes'])} of {sized(facts['host_room_bytes'])} that rows may "
        f"take there: {'fits' if facts['fits'] else 'does not fit'}; {facts['max_ids']:,} ids would fit",
    ]
    if not facts["fits"]:
        hosts, here = facts["hosts_needed"], -(-facts["shards"] // facts["hosts"])
        needed = "more memory in a host" if hosts is None else f"--hosts {hosts} --shards {hosts * here}"
        lines.append(f"       it takes {needed}, or rows of 16 bits, or an optimizer with fewer slots")
    lines.append("Not counted: rows that a snapshot copies because they are written meanwhile; other tables.")
    return "\n".join(lines)


def bytes_of(memory: str) -> int:
    try:
        found = int(TypeAdapter(ByteSize).validate_python(memory))
    except ValidationError as exc:
        raise ConfigError(f"--memory is {memory!r}; it must be a number of bytes, as 64GB or 60GiB") from exc
    if memory.isdecimal() and found < MIB:
        raise ConfigError(f"--memory is {memory!r}, {counted(found, 'byte')}; say of what it is, as 64GB or 60GiB")
    return found
