"""InsightFace's face data: a RecordIO file of MXNet (``train.rec``) and its index (``train.idx``).

    record   u32 magic 0xced7230a · u32 part (3 bits) and length (29 bits) · payload · zeros up to 4 bytes
             a payload that holds the magic at a multiple of 4 is cut there: parts 1 (first), 2, 3 (last)
    payload  u32 flag · f32 label · u64 id · u64 id2 · flag × f32 labels · the encoded picture
    index    lines of "key<tab>offset"
    layout   record 0 has labels [images + 1, …] and no picture; records of identities, which name the range of their
             pictures, have none either; every other record is a picture, and its (first) label is its class

float32 holds every integer up to 2^24. With more pictures the count in record 0 is rounded, so it is not used; classes
from there on could be confused, and are refused.
"""

from __future__ import annotations

import io
import mmap
import struct
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NoReturn

from PIL import Image

from geartrain.ams.values.errors import InvalidArgument
from geartrain.workers.data.bitmaps import decode_picture
from geartrain.workers.data.pictures import Picture, by_class

MAGIC = 0xCED7230A
_MAGIC_BYTES = struct.pack("<I", MAGIC)
_HEAD = struct.Struct("<II")
_IMAGE_HEADER = struct.Struct("<IfQQ")
_LENGTH_BITS = 29
_WHOLE, _FIRST, _MIDDLE, _LAST = range(4)
_EXACT_FLOATS = 1 << 24
_MAX_DIGITS = 20


def records_of(data: Path) -> Path | None:
    """Return the record file of ``data``: itself, or the only ``*.rec`` (or ``train.rec``) of a folder; else None."""
    if not data.is_dir():
        return data if data.suffix == ".rec" and data.is_file() else None
    found = sorted(data.glob("*.rec"))
    if len(found) > 1 and data / "train.rec" not in found:
        raise InvalidArgument(f"{data} has several record files ({', '.join(file.name for file in found)}); name one")
    return (data / "train.rec" if data / "train.rec" in found else found[0]) if found else None


def read_records(path: Path) -> dict[str, list[Picture]]:
    """Return the pictures of each class, in the order of their keys (without an index, of the file).

    Reads the header of every record now, the picture later. Raises InvalidArgument naming the file and the offset.
    """
    return by_class(_labelled(path), str(path))


def _labelled(path: Path) -> Iterator[tuple[str, Picture]]:
    if path.stat().st_size == 0:
        raise InvalidArgument(f"{path} is empty; copy or pack it anew")
    with path.open("rb") as file, closing(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)) as data:
        index = path.with_suffix(".idx")
        offsets = _read_index(index, len(data)) if index.exists() else list(_walk(path, data))
        images, claimed = 0, 0.0
        for place, (key, offset) in enumerate(offsets):
            label, num_labels, has_picture = _read_header(path, data, offset)
            if place == 0 and key == 0 and num_labels > 1 and not has_picture:
                claimed = label - 1
            if not has_picture:
                continue
            if not (0 <= label < _EXACT_FLOATS and label == int(label)):
                _refuse(path, offset, f"the class is {label!r}; it must be an integer from 0 to {_EXACT_FLOATS - 1:,}")
            images += 1
            yield str(int(label)), Picture(path, _read_picture, offset, 0, f" at offset {offset}")
        if images < claimed < _EXACT_FLOATS:
            raise InvalidArgument(
                f"{path} has {images:,} pictures, its record 0 says {int(claimed):,}; copy the file and its index anew"
            )


def _read_picture(picture: Picture) -> Image.Image:
    path, offset = picture.path, picture.offset
    with path.open("rb") as file, closing(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)) as data:
        payload = _payload(data, _parts(path, data, offset))
    return decode_picture(io.BytesIO(payload[_header_end(path, offset, payload, len(payload)) :]), picture.where)


def _read_index(index: Path, size: int) -> list[tuple[int, int]]:
    """Return (key, offset) of all records, by key."""
    found: dict[int, int] = {}
    offsets: set[int] = set()
    for number, line in enumerate(index.read_bytes().splitlines(), 1):
        fields = line.split()
        if len(fields) != 2 or not all(field.isdigit() and len(field) < _MAX_DIGITS for field in fields):
            raise InvalidArgument(f"{index}, line {number}, is {line!r:.80}; it must be 'key<tab>offset'")
        key, offset = map(int, fields)
        if offset % 4 or offset + _HEAD.size > size:
            raise InvalidArgument(
                f"{index}, line {number}: offset {offset} of key {key} is no record of the {size:,} bytes beside it; "
                "do the two files belong together?"
            )
        if key in found:
            raise InvalidArgument(f"{index}, line {number}: key {key} is there twice")
        if offset in offsets:
            raise InvalidArgument(
                f"{index}, line {number}: key {key} is at offset {offset}, where another key is; make the index anew"
            )
        found[key] = offset
        offsets.add(offset)
    return sorted(found.items())


def _walk(path: Path, data: mmap.mmap) -> Iterator[tuple[int, int]]:
    """Yield (number, offset) of the records, in order."""
    offset = number = 0
    while offset < len(data):
        yield number, offset
        start, length = _parts(path, data, offset)[-1]
        number, offset = number + 1, start + _padded(length)


def _read_header(path: Path, data: mmap.mmap, offset: int) -> tuple[float, int, bool]:
    """Return the first label of the record at ``offset``, their number, and whether a picture follows them."""
    parts = _parts(path, data, offset)
    length = sum(size for _, size in parts) + len(_MAGIC_BYTES) * (len(parts) - 1)
    start, size = parts[0]
    head = data[start : start + min(size, _IMAGE_HEADER.size + 4)]
    if len(head) < _IMAGE_HEADER.size + 4 and len(parts) > 1:  # the magic is in the header itself
        head = _payload(data, parts)
    end = _header_end(path, offset, head, length)
    flag, label, _, _ = _IMAGE_HEADER.unpack_from(head)
    if flag:
        (label,) = struct.unpack_from("<f", head, _IMAGE_HEADER.size)
    return label, flag or 1, length > end


def _header_end(path: Path, offset: int, head: bytes, length: int) -> int:
    """Return the header's bytes, labels included, of a payload of ``length`` bytes that begins with ``head``."""
    if length < _IMAGE_HEADER.size:
        _refuse(path, offset, f"a record of {length} bytes has no image header ({_IMAGE_HEADER.size} bytes)")
    flag, _, _, _ = _IMAGE_HEADER.unpack_from(head)
    end = int(_IMAGE_HEADER.size + 4 * flag)
    if end > length:
        _refuse(path, offset, f"its header tells {flag:,} labels, which do not fit its {length:,} bytes")
    return end


def _payload(data: mmap.mmap, parts: list[tuple[int, int]]) -> bytes:
    return _MAGIC_BYTES.join(data[start : start + size] for start, size in parts)  # it was cut out between the parts


def _parts(path: Path, data: mmap.mmap, offset: int) -> list[tuple[int, int]]:
    """Return (start, length) of each part of the payload of the record at ``offset``."""
    parts: list[tuple[int, int]] = []
    at, expected = offset, (_WHOLE, _FIRST)
    while True:
        if at + _HEAD.size > len(data):
            _refuse(path, at, f"the file ends at {len(data)} within a record")
        magic, word = _HEAD.unpack_from(data, at)
        part, length = word >> _LENGTH_BITS, word & ((1 << _LENGTH_BITS) - 1)
        if magic != MAGIC:
            _refuse(path, at, f"{magic:#010x} is where a record's magic {MAGIC:#010x} should be")
        if part not in expected:
            _refuse(path, at, f"part {part} of a record is where one of {expected} should be")
        start = at + _HEAD.size
        if start + length > len(data):
            _refuse(path, at, f"a record of {length:,} bytes is cut: {len(data) - start:,} are there")
        parts.append((start, length))
        if part in (_WHOLE, _LAST):
            return parts
        at, expected = start + _padded(length), (_MIDDLE, _LAST)


def _padded(length: int) -> int:
    return (length + 3) // 4 * 4


def _refuse(path: Path, offset: int, what: str) -> NoReturn:
    raise InvalidArgument(f"{path} is damaged at offset {offset}: {what}; copy or pack it anew")
