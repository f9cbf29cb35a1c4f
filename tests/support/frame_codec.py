"""Frames, written and read as docs/explanation/frames.md says: nothing here was taken from the product's own code."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

Described = dict[str, Any]
"""An operation: kind, table, ids and rows (bytes), and what else its header says, by the names used here."""

HEADER = struct.Struct("<4sHHIIQQqqd")
OPERATION = struct.Struct("<BBHIQqqqqddqqqqHHHHI12x")
REPLY = struct.Struct("<BBHIqdQQq8x")
BATCH = struct.Struct("<qdq")
KINDS = {"pull": 1, "push": 2, "assign": 3}
ITEM_BYTES = (4, 2, 2)
MASK = 2**64 - 1


def splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def checksum(begun_with: int, data: bytes) -> int:
    for (word,) in struct.iter_unpack("<Q", data):
        begun_with = splitmix64(begun_with ^ word)
    return begun_with


def signed(data: bytes, begun_with: int, more: bytes = b"") -> bytes:
    return data + struct.pack("<Q", checksum(begun_with, data + more))


def padded(data: bytes, to: int) -> bytes:
    return data + bytes(-len(data) % to)


def header(
    kind: int, operations: int, number: int, body: int, shard: int = 0, version: int = 0, seconds: float = 0
) -> bytes:
    return signed(HEADER.pack(b"GTRF", 1, kind, operations, 0, number, body, shard, version, seconds), 0)


def request(number: int, seconds: float, operations: Sequence[Described]) -> bytes:
    frame = bytes(64)
    for item in operations:
        frame += operation(number, item)
        frame = padded(frame + item["ids"], 64)
        frame = padded(frame + item.get("rows", b""), 64)
        frame = padded(frame + item.get("occurrences", b""), 64)
    first = operations[0]
    whole = header(
        1, len(operations), number, len(frame) - 64, first["shard_incarnation"], first["cluster_version"], seconds
    )
    return whole + frame[64:]


def operation(number: int, one: Described) -> bytes:
    group = one.get("group") or one.get("required_sync") or {}
    flags = ("lr" in one) | 2 * one.get("with_present", False) | 4 * one.get("step_goes_on", False)
    flags |= 8 * ("group" in one) | 16 * ("required_sync" in one)
    flags |= (
        32 * ("step" in one) | 64 * ("unix_seconds" in one) | 128 * ("pulled_at" in one) | 256 * ("occurrences" in one)
    )
    batch = (
        BATCH.pack(one.get("step", 0), one.get("unix_seconds", 0.0), one.get("pulled_at", 0)) if flags & 224 else b""
    )
    names = [one["table"].encode(), one["stream"].encode(), group.get("job", "").encode()]
    scalars = b"".join(
        struct.pack("<dH", value, len(name.encode())) + name.encode() for name, value in one.get("scalars", ())
    )
    texts = padded(b"".join(names) + scalars + batch, 8)
    fixed = OPERATION.pack(
        KINDS[one["kind"]],
        one["dtype"],
        flags,
        one["dim"],
        len(one["ids"]) // 8,
        one["table_incarnation"],
        one["incarnation"],
        one["sequence"],
        one["oldest_unacknowledged"],
        one.get("lr", 0.0),
        one.get("scale", 1.0),
        *(group.get(name, 0) for name in ("world_size", "rank", "sequence", "sample_count")),
        *map(len, names),
        len(one.get("scalars", ())),
        len(scalars),
    )
    return signed(fixed, number, texts) + texts


def parsed_header(frame: bytes, kind: int) -> tuple[int, int, int, int, float]:
    """Operations, number, shard, version, seconds."""
    magic, version, found, operations, zero, number, body, shard, cluster, seconds = HEADER.unpack(frame[:56])
    assert (magic, version, found, zero) == (b"GTRF", 1, kind, 0)
    assert frame[56:64] == struct.pack("<Q", checksum(0, frame[:56]))
    assert body == len(frame) - 64
    return operations, number, shard, cluster, seconds


def parsed_request(frame: bytes) -> tuple[int, float, list[Described]]:
    count, number, shard, cluster, seconds = parsed_header(frame, 1)
    at = 64
    operations = []
    for _ in range(count):
        one, at = parsed_operation(frame, at, number)
        operations.append({**one, "shard_incarnation": shard, "cluster_version": cluster})
    assert at == len(frame)
    return number, seconds, operations


def parsed_operation(frame: bytes, at: int, number: int) -> tuple[Described, int]:
    fields = OPERATION.unpack(frame[at : at + 120])
    kind, dtype, flags, dim, num_ids, table_incarnation, incarnation, sequence, oldest, lr, scale = fields[:11]
    group, (table_bytes, stream_bytes, job_bytes, num_scalars, scalars_bytes) = fields[11:15], fields[15:]
    start = at + 128
    end = start + table_bytes + stream_bytes + job_bytes + scalars_bytes + (BATCH.size if flags & 224 else 0)
    end += -(end - start) % 8
    assert frame[at + 120 : start] == struct.pack("<Q", checksum(number, frame[at : at + 120] + frame[start:end]))
    names = []
    for size in (table_bytes, stream_bytes, job_bytes):
        names.append(frame[start : start + size].decode())
        start += size
    scalars = []
    for _ in range(num_scalars):
        value, size = struct.unpack("<dH", frame[start : start + 10])
        scalars.append((frame[start + 10 : start + 10 + size].decode(), value))
        start += 10 + size
    one: Described = {
        "kind": {number: name for name, number in KINDS.items()}[kind],
        "dtype": dtype,
        "dim": dim,
        "table": names[0],
        "stream": names[1],
        "table_incarnation": table_incarnation,
        "incarnation": incarnation,
        "sequence": sequence,
        "oldest_unacknowledged": oldest,
        "ids": frame[end : end + 8 * num_ids],
    }
    at = end + 8 * num_ids
    at += -at % 64
    if kind == 1:
        one["with_present"] = bool(flags & 2)
    else:
        size = num_ids * dim * ITEM_BYTES[dtype]
        one["rows"] = frame[at : at + size]
        at += size + -(at + size) % 64
    if kind == 2:
        one |= {"scale": scale, "step_goes_on": bool(flags & 4), "scalars": scalars}
        one |= {"lr": lr} if flags & 1 else {}
        if flags & 224:
            said = zip(
                (32, 64, 128), ("step", "unix_seconds", "pulled_at"), BATCH.unpack_from(frame, start), strict=True
            )
            one |= {name: value for flag, name, value in said if flags & flag}
        if flags & 256:
            one["occurrences"] = frame[at : at + 4 * num_ids]
            at += 4 * num_ids + -(at + 4 * num_ids) % 64
    if flags & 24:
        named = dict(zip(("world_size", "rank", "sequence", "sample_count"), group, strict=True))
        one["group" if flags & 8 else "required_sync"] = {"job": names[2], **named}
    return one, at


def reply(number: int, results: Sequence[Described]) -> bytes:
    """Each result: rows and present (bytes), created, duplicate; or error, message, retry_after_seconds."""
    at = 64 + 64 * len(results)
    heads, bodies = b"", b""
    for result in results:
        error, message = result.get("error", "").encode(), result.get("message", "").encode()
        data = error + message if error else result.get("rows", b"") + result.get("present", b"")
        flags = result.get("duplicate", False) | 2 * bool(result.get("present"))
        offset = at + len(bodies)
        created, wait = result.get("created", 0), result.get("retry_after_seconds", 0.0)
        fields = (bool(error), flags, len(error), 0, created, wait, offset, len(data), result.get("writes", 0))
        heads += signed(REPLY.pack(*fields), number)
        bodies = padded(bodies + data, 64)
    return header(2, len(results), number, len(heads) + len(bodies)) + heads + bodies


def parsed_reply(frame: bytes, number: int, rows_bytes: Sequence[int]) -> list[Described]:
    """The results of a reply; ``rows_bytes`` says how long the rows of each operation are."""
    count, found, *_ = parsed_header(frame, 2)
    assert (count, found) == (len(rows_bytes), number)
    results: list[Described] = []
    for index, size in enumerate(rows_bytes):
        at = 64 + 64 * index
        refused, flags, name, zero, created, wait, offset, length, writes = REPLY.unpack(frame[at : at + 56])
        assert zero == 0 and frame[at + 56 : at + 64] == struct.pack("<Q", checksum(number, frame[at : at + 56]))
        data = frame[offset : offset + length]
        assert len(data) == length
        if refused:
            results.append(
                {"error": data[:name].decode(), "message": data[name:].decode(), "retry_after_seconds": wait}
            )
        else:
            assert size == 0 or offset % 64 == 0
            results.append({"rows": data[:size], "created": created, "duplicate": bool(flags & 1), "writes": writes})
            if flags & 2:
                results[-1]["present"] = data[size:]
    return results
