"""Manifest of a snapshot, ``manifest.json``: every file with its content's hash, and a hash of the manifest itself.

The file is the only text that its content can have (sorted keys, one separator, one form of each number). A reader
compares it with that text, so any changed bit is found, even in a blank.
"""

from __future__ import annotations

import base64
import json
import re
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

import xxhash
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from geartrain.ams.values.errors import InvalidArgument, SnapshotOfOtherFormat
from geartrain.ams.values.placement import (
    NUM_BUCKETS,
    BucketShards,
    placement_from_bytes,
    placement_to_bytes,
)
from geartrain.ams.values.text import of_another_version, other_format

FORMAT: Literal[1] = 1
MANIFEST = "manifest.json"
JOB = "job"
"""Kind of the job's files, opaque here."""
DEDUP = "dedup"
"""Kind of the files with what a shard knew of the writes to its rows: JSON values."""
ROWS = "rows"
"""Kind of row blocks, each of a range of buckets: arrays ids [N], rows [N, D] and, where the optimizer has them, slots
[N, D] ([N, 2 D] with Adam).

Where untouched rows move, also steps [N]: rows and slots are those of that step; the dedup state says which came after.
With Adam steps [N] are the numbers of the rows' updates. Of tables that keep them, when each row was last seen, on the
clock of the dedup state, and how often: seen_steps, seen_seconds and counts [N].
"""
EXPORT = "export"
"""Kind of the row blocks of a version of an export: ids [N] and rows [N, D] alone."""
ROW_KINDS = (ROWS, EXPORT)
REMOVED = "removed"
"""Kind of the blocks with the ids [N] of rows that were removed since the parent. Those that the same snapshot has rows
of came back."""
ADMISSION = "admission"
"""Kind of the blocks with what a table's admission had counted on a shard, all of it in every snapshot: ranges [R],
counters [R, B] and waiting [R] of filters, and num_pushes [1]."""
GRAPH = "graph"
"""Kind of the blocks of a class table's graph."""
MAX_MANIFEST_BYTES = 1 << 30
SNAPSHOT_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
"""Of a snapshot, and of a file of the job."""
_DIGEST = "xxh3_128"
_OF_OTHER_KEYS = {"missing", "extra_forbidden"}
"""What pydantic calls a key too few and one too many."""

Hex128 = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Count = Annotated[int, Field(ge=0)]
BucketPlace = Annotated[int, Field(ge=0, lt=NUM_BUCKETS)]


class FileEntry(BaseModel):
    """One file of a snapshot. Checks that its name is the one its other fields give."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    path: str
    """Name within the snapshot's folder."""
    kind: str
    """What it holds: ``job`` for bytes that are opaque here, ``dedup``, else a kind of block, such as ``rows``."""
    table: str | None
    """Name of the table; None for the job's files and dedup state."""
    shard: Count | None
    """Shard that wrote it; None for the job's files."""
    index: Count
    """Number of the block among those of its kind, table and shard."""
    num_rows: Count
    """Rows it holds."""
    bytes: Count
    """Length of the file."""
    xxh3_128: Hex128
    """Hash of the whole file."""
    buckets: Annotated[list[BucketPlace], Field(min_length=2, max_length=2)] | None = None
    """Of rows, the first and last place, in ``BUCKET_ORDER``, of their buckets; None: any that its shard has."""

    @model_validator(mode="after")
    def _is_named_after_its_content(self) -> Self:
        if self.buckets is not None and self.buckets[0] > self.buckets[1]:
            raise ValueError(f"buckets of {self.path!r} are {self.buckets}; the first place is after the last")
        if self.kind == JOB:
            if (self.table, self.shard) != (None, None) or self.path != job_path(self.path.removeprefix(f"{JOB}-")):
                raise ValueError(f"path is {self.path!r}; a file of the job is {JOB}-NAME, without table and shard")
        elif self.kind == DEDUP:
            if self.table is not None or self.shard is None or self.path != dedup_path(self.shard):
                raise ValueError(
                    f"path is {self.path!r}; the dedup state of shard {self.shard} has another, and no table"
                )
        elif self.table is None or self.shard is None:
            raise ValueError(f"{self.path!r} is a block, but its table is {self.table!r} and its shard {self.shard!r}")
        elif self.path != (expected := block_path(self.kind, self.table, self.shard, self.index)):
            raise ValueError(f"path is {self.path!r}; the block it describes is {expected!r}")
        return self


class Parent(BaseModel):
    """The snapshot of the same root that another one adds to."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: Annotated[str, Field(pattern=f"^{SNAPSHOT_NAME}$")]
    id: Hex128


class Writer(BaseModel):
    """The process that took a snapshot: its stream, and which incarnation of it."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    stream: Annotated[str, Field(min_length=1)]
    incarnation: Count


class Manifest(BaseModel):
    """The content of ``manifest.json``."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    format: Literal[1] = FORMAT
    """Of the folder's layout."""
    id: Hex128
    """Identity of the snapshot, also inside every block."""
    step: Count
    """Step at whose boundary it was taken."""
    created: Annotated[float, Field(allow_inf_nan=False)]
    """Unix time in seconds."""
    number: Count
    """Rises with each snapshot that is written to a root, whatever its step: the order of the runs, and of the lives of
    a run, that share it."""
    num_shards: Annotated[int, Field(ge=1)]
    """Shards that wrote it; any number may read it."""
    placement: str
    """The bucket map that the shards wrote by: uint16 [4096], little-endian, in base64."""
    tables: list[dict[str, JsonValue]]
    """Specification of each table."""
    job: dict[str, JsonValue]
    """What the job needs to go on: cursors, settings."""
    parent: Parent | None = None
    """Snapshot that this one adds to; None: it is whole."""
    deltas: dict[str, list[Count]] = {}
    """By table, the shards that wrote only the rows touched since the parent. The others wrote all rows of theirs, so
    that nothing of the parent counts in their buckets."""
    writer: Writer | None = None
    """Who took it; None: a process without a name, which nobody can supersede."""
    moment: Hex128 | None = None
    """Snapshot of the same moment that this one was compacted from."""
    files: list[FileEntry]
    """Every file but the manifest, in order of path."""

    @property
    def bucket_shards(self) -> BucketShards:
        """The shard that wrote the rows of each bucket. Raises ValueError if ``placement`` does not say it."""
        return placement_from_bytes(base64.b64decode(self.placement, validate=True))

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        if (last := self.bucket_shards.max()) >= self.num_shards:
            raise ValueError(f"placement names shard {last}; num_shards is {self.num_shards}")
        twice = [path for path, count in Counter(entry.path for entry in self.files).items() if count > 1]
        if twice:
            raise ValueError(f"files lists {twice[0]!r} more than once")
        foreign = [entry for entry in self.files if entry.shard is not None and entry.shard >= self.num_shards]
        if foreign:
            raise ValueError(f"{foreign[0].path!r} is of shard {foreign[0].shard}; num_shards is {self.num_shards}")
        if (self.parent is None) != (not self.deltas):
            raise ValueError(f"parent is {self.parent}, deltas are {self.deltas}; one needs the other")
        if any(not shards or max(shards) >= self.num_shards for shards in self.deltas.values()):
            raise ValueError(f"deltas are {self.deltas}; each must list shards below num_shards, {self.num_shards}")
        return self

    @property
    def is_export(self) -> bool:
        """Whether its rows are without the optimizer's state, so that followers can use them and tables cannot."""
        return any(entry.kind == EXPORT for entry in self.files)

    @property
    def moment_id(self) -> str:
        """Identity of the moment that it holds: equal for a snapshot and what it was compacted into."""
        return self.moment or self.id


def block_path(kind: str, table: str, shard: int, index: int) -> str:
    """Return the name of a block's file: legible, and different for different tables. Raises InvalidArgument."""
    if kind in (JOB, DEDUP) or not re.fullmatch(r"[a-z][a-z0-9_]{0,31}", kind):
        raise InvalidArgument(
            f"kind is {kind!r}; it must be 1 to 32 of a-z, 0-9 and _, begin with a letter and not be {JOB!r} or "
            f"{DEDUP!r}"
        )
    for label, value in (("shard", shard), ("index", index)):
        if value < 0:
            raise InvalidArgument(f"{label} is {value}; it must be >= 0")
    legible = re.sub(r"[^A-Za-z0-9_.]+", "_", table)[:40]
    digest = xxhash.xxh3_64_hexdigest(table.encode("utf-8", "surrogatepass"))
    return f"{kind}-{legible}-{digest}-{shard:05}-{index:06}.safetensors"


def job_path(name: str) -> str:
    """Return the name of the file that holds the job's ``name``. Raises InvalidArgument."""
    if not re.fullmatch(SNAPSHOT_NAME, name):
        raise InvalidArgument(
            f"name is {name!r}; it must be 1 to 100 of A-Z, a-z, 0-9 and ._- and begin with a letter or digit"
        )
    return f"{JOB}-{name}"


def dedup_path(shard: int) -> str:
    """Return the name of the file that holds a shard's dedup state."""
    return f"{DEDUP}-{shard:05}.json"


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the file's content. Raises InvalidArgument where ``tables`` or ``job`` hold what JSON cannot (NaN)."""
    try:
        return seal_json(manifest.model_dump(mode="json"))
    except ValueError as exc:
        raise InvalidArgument(f"the manifest cannot be written as JSON: {exc}") from exc


def decode_manifest(data: bytes) -> Manifest:
    """Return what :func:`encode_manifest` wrote. Raises SnapshotOfOtherFormat, ValueError saying what is wrong."""
    content = unseal_json(data)
    if content.get("format") != FORMAT:
        raise SnapshotOfOtherFormat(other_format(content.get("format"), FORMAT))
    try:
        return Manifest.model_validate(content)
    except (ValidationError, InvalidArgument) as exc:
        if isinstance(exc, ValidationError) and {error["type"] for error in exc.errors()} <= _OF_OTHER_KEYS:
            raise SnapshotOfOtherFormat(of_another_version(in_words(exc))) from exc
        raise ValueError(f"its content is not legal: {in_words(exc)}") from exc


def encode_placement(bucket_shards: BucketShards) -> str:
    """Return a map as :attr:`Manifest.placement` has it."""
    return base64.b64encode(placement_to_bytes(bucket_shards)).decode()


def in_words(exc: ValidationError | InvalidArgument) -> str:
    """Return the first thing that is wrong."""
    if isinstance(exc, InvalidArgument):
        return str(exc)
    first = exc.errors(include_url=False)[0]
    return f"{'.'.join(str(part) for part in first['loc']) or 'content'}: {first['msg']}, not {first['input']!r:.200}"


def seal_json(content: Mapping[str, Any]) -> bytes:
    """Return the one text of ``content``, with its hash as one more key. Raises ValueError for what JSON cannot say."""
    text = json.dumps(content, sort_keys=True, ensure_ascii=False, allow_nan=False)
    sealed = {**content, _DIGEST: xxhash.xxh3_128_hexdigest(text.encode())}
    return (json.dumps(sealed, sort_keys=True, ensure_ascii=False, allow_nan=False, indent=1) + "\n").encode()


def unseal_json(data: bytes) -> dict[str, Any]:
    """Return what :func:`seal_json` was given. Raises ValueError, saying what is wrong, if any bit of it is changed."""
    try:
        content: Any = json.loads(data)
        is_whole = isinstance(content, dict) and _DIGEST in content
        if is_whole:
            del content[_DIGEST]
            is_whole = seal_json(content) == data
    except (ValueError, RecursionError) as exc:
        raise ValueError(f"it is not valid JSON ({exc})") from exc
    if not is_whole:
        raise ValueError("its content does not match its checksum")
    found: dict[str, Any] = content
    return found
