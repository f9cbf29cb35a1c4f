"""Small files of glyphs as face data are packed, written independently of the readers."""

from __future__ import annotations

import io
import struct
import tarfile
from collections.abc import Iterable
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

MAGIC = struct.pack("<I", 0xCED7230A)


def glyph(character: str, seed: int) -> Image.Image:
    """The character, a little elsewhere and of another size for each seed."""
    picture = Image.new("RGB", (48, 48), (240, 240, 230))
    font = ImageFont.load_default(size=30 + seed % 5)
    ImageDraw.Draw(picture).text((10 + seed % 4, 2 + seed % 3), character, (20, 20, 90), font)
    return picture


def encoded(picture: Image.Image, kind: str = "PNG") -> bytes:
    """The picture's file."""
    file = io.BytesIO()
    picture.save(file, kind)
    return file.getvalue()


def write_tar(path: Path, members: Iterable[tuple[str, bytes]]) -> None:
    """A shard with these members."""
    with tarfile.open(path, "w") as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def record(payload: bytes) -> bytes:
    """One record as dmlc-core writes it: cut where the magic lies at a multiple of four."""
    cuts = [at for at in range(0, len(payload) - 3, 4) if payload[at : at + 4] == MAGIC]
    parts = [payload[a:b] for a, b in zip([0, *(at + 4 for at in cuts)], [*cuts, len(payload)], strict=True)]
    last = len(parts) - 1
    out = b""
    for place, part in enumerate(parts):
        flag = 0 if last == 0 else 1 if place == 0 else 3 if place == last else 2
        out += MAGIC + struct.pack("<I", flag << 29 | len(part)) + part + bytes(-len(part) % 4)
    return out


def image_record(label: float, key: int, image: bytes, *, labels: tuple[float, ...] = ()) -> bytes:
    """Header and picture; with ``labels`` several of them."""
    header = struct.pack("<IfQQ", len(labels), 0.0 if labels else label, key, 0)
    return header + struct.pack(f"<{len(labels)}f", *labels) + image


def write_records(path: Path, images: list[tuple[int, bytes]], *, index: bool = True) -> list[int]:
    """An InsightFace file of (class, picture), classes rising: header, pictures, identities; return the offsets."""
    count, classes = len(images), sorted({label for label, _ in images})
    payloads = [image_record(0, 0, b"", labels=(count + 1.0, count + 1.0 + len(classes)))]
    payloads += [
        image_record(0, key, image, labels=(label, 0.0)) if key % 2 else image_record(label, key, image)
        for key, (label, image) in enumerate(images, 1)
    ]
    for number, label in enumerate(classes):
        keys = [key for key, (of, _) in enumerate(images, 1) if of == label]
        payloads.append(image_record(0, count + 1 + number, b"", labels=(keys[0], keys[-1] + 1.0)))
    offsets, data = [], b""
    for payload in payloads:
        offsets.append(len(data))
        data += record(payload)
    path.write_bytes(data)
    if index:
        lines = "".join(f"{key}\t{offset}\n" for key, offset in enumerate(offsets))
        path.with_suffix(".idx").write_text(lines)
    return offsets
