"""WebDataset shards: tar files in which the members of one sample share all of their path up to its first dot.

    000017.jpg   the picture: any suffix of ``IMAGE_SUFFIXES``
    000017.cls   its class: a number or a name
    000017.json  or the class as ``label``, ``cls`` or ``class`` of a JSON object

Read with the standard library: the package of this name adds nothing for a few local shards, and it unpickles members
and runs commands given as file names.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from geartrain.ams.values.errors import InvalidArgument
from geartrain.workers.data.bitmaps import IMAGE_SUFFIXES
from geartrain.workers.data.pictures import Picture, by_class, read_part

_CLASS_KEYS = ("label", "cls", "class")
_LARGEST_LABEL_BYTES = 1 << 20


def shards_of(data: Path) -> list[Path]:
    """Return the shards of ``data``: one tar file, or the tar files of a folder, sorted; empty if it has none."""
    if data.is_dir():
        return sorted(data.glob("*.tar"))
    return [data] if data.suffix == ".tar" and data.is_file() else []


def read_shards(shards: list[Path]) -> dict[str, list[Picture]]:
    """Return the pictures of each class, in the order of the shards. Raises InvalidArgument naming shard and offset."""
    labelled = (sample for shard in shards for sample in _samples(shard))
    return by_class(labelled, ", ".join(map(str, shards[:3])))


def _samples(shard: Path) -> Iterator[tuple[str, Picture]]:
    """Yield (class, picture) of each sample, whose members are adjacent."""
    key, label, picture, last = "", None, None, -1
    num_bytes = shard.stat().st_size
    try:
        with tarfile.open(shard, "r:") as archive:
            for member in archive:
                stays_inside = 0 <= member.size <= num_bytes - member.offset_data
                if member.offset <= last or not stays_inside or member.issparse():
                    raise InvalidArgument(
                        f"{shard} is damaged at offset {max(last, 0)}: {member.name!r:.80} has {member.size} bytes in "
                        "a place or form that no shard has; pack it anew"
                    )
                last = member.offset
                name = Path(member.name)
                stem, _, suffix = name.name.partition(".")
                if not member.isfile() or not stem:
                    continue
                if (found := str(name.parent / stem)) != key:
                    yield from _whole(shard, key, label, picture)
                    key, label, picture = found, None, None
                where = f"{shard}: {member.name} at offset {member.offset}"
                if f".{suffix.lower()}" in IMAGE_SUFFIXES:
                    if picture is not None:
                        raise InvalidArgument(f"{where} is a second picture of its sample; give each a name of its own")
                    place = f": {member.name} at offset {member.offset}"
                    picture = Picture(shard, read_part, member.offset_data, member.size, place)
                elif suffix in ("cls", "json"):
                    told = _label(archive, member, where)
                    if None not in (told, label) and told != label:
                        raise InvalidArgument(
                            f"{where} has class {told!r:.80}, another member {label!r:.80}; give one class a sample"
                        )
                    label = told if label is None else label
            end = archive.offset
        _require_end(shard, end)
    except (tarfile.TarError, EOFError, ValueError, OverflowError, RecursionError) as exc:
        if isinstance(exc, InvalidArgument):
            raise
        raise InvalidArgument(f"{shard} is not a whole tar file: {exc}; copy or pack it anew") from exc
    yield from _whole(shard, key, label, picture)


def _require_end(shard: Path, end: int) -> None:
    """Raise InvalidArgument unless the tar file ends in zeros: a cut after a whole member would go unnoticed."""
    with shard.open("rb") as file:
        file.seek(end)
        block = file.read(tarfile.BLOCKSIZE)
    if block != tarfile.NUL * tarfile.BLOCKSIZE:
        raise InvalidArgument(f"{shard} is cut: no end of the archive at offset {end}; copy or pack it anew")


def _whole(shard: Path, key: str, label: str | None, picture: Picture | None) -> Iterator[tuple[str, Picture]]:
    if picture is None:
        return
    if label is None:
        raise InvalidArgument(
            f"{shard}: sample {key!r} has a picture and no class; add {key}.cls, "
            f"or {key}.json with one of {', '.join(_CLASS_KEYS)}"
        )
    yield label, picture


def _label(archive: tarfile.TarFile, member: tarfile.TarInfo, where: str) -> str | None:
    """Return the class in a member; None for a JSON object without one."""
    if member.size > _LARGEST_LABEL_BYTES:
        raise InvalidArgument(f"{where} has {member.size:,} bytes; a label has at most {_LARGEST_LABEL_BYTES:,}")
    file = archive.extractfile(member)
    data = b"" if file is None else file.read()
    if len(data) != member.size:
        raise InvalidArgument(f"{where} is cut: {len(data)} of {member.size} bytes are there; copy the file anew")
    try:
        if member.name.endswith(".json"):
            values: Any = json.loads(data)
            found = next((values[key] for key in _CLASS_KEYS if key in values), None)
            return None if found is None else _class_of(found)
        text = data.decode().strip()
    except (ValueError, TypeError, OverflowError, RecursionError) as exc:
        raise InvalidArgument(f"{where} has no class: {exc}") from exc
    if not text:
        raise InvalidArgument(f"{where} is empty; it must hold the class of its picture")
    return text


def _class_of(value: Any) -> str:
    """Return the name of a class in JSON, as a ``.cls`` would have it: 3.0 is class 3. Raises ValueError."""
    if isinstance(value, float) and value == int(value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
        raise ValueError(f"its class is {value!r:.80}; it must be a name or a whole number")
    return str(value)
