"""WebDataset shards and RecordIO files, written by an independent little writer."""

from __future__ import annotations

import io
import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from geartrain.ams.values.errors import InvalidArgument
from geartrain.workers.data.bitmaps import Preprocessing
from geartrain.workers.data.folder import find_pictures, load_folder
from tests.support.face_files import MAGIC, encoded, glyph, image_record, record, write_records, write_tar

QUIET = Console(file=io.StringIO())
LOOK = Preprocessing(kind="photo", size=32, channels=3)
CHARACTERS = "ABK"


def labelled() -> list[tuple[int, bytes]]:
    return [(label, encoded(glyph(CHARACTERS[label], seed))) for label in range(3) for seed in range(4)]


def packed(folder: Path, kind: str) -> Path:
    """The same twelve glyphs, as sub-folders, shards or records."""
    folder.mkdir()
    if kind == "folder":
        for place, (label, data) in enumerate(labelled()):
            (folder / str(label)).mkdir(exist_ok=True)
            (folder / str(label) / f"{place:02}.png").write_bytes(data)
        return folder
    if kind.startswith("rec"):
        write_records(folder / "train.rec", labelled(), index=kind == "rec")
        return folder if kind == "rec" else folder / "train.rec"
    members = []
    for place, (label, data) in enumerate(labelled()):
        told = (f"{place:03}.cls", str(label).encode()) if place % 2 else (f"{place:03}.json", b'{"label": %d}' % label)
        members.append([(f"{place:03}.png", data), told])
    write_tar(folder / "part-0.tar", [member for sample in members[:5] for member in sample])
    write_tar(folder / "part-1.tar", [member for sample in members[5:] for member in reversed(sample)])
    return folder


@pytest.mark.parametrize("kind", ["tar", "rec", "rec without index"])
def test_every_archive_holds_what_the_folder_holds(kind: str, tmp_path: Path) -> None:
    expected = load_folder(packed(tmp_path / "plain", "folder"), LOOK, held_out=0.25, seed=3, console=QUIET)
    found = load_folder(packed(tmp_path / "packed", kind), LOOK, held_out=0.25, seed=3, console=QUIET)
    assert found.class_names == expected.class_names == ["0", "1", "2"]
    for part in ("train", "validation"):
        assert torch.equal(getattr(found, part).bitmaps, getattr(expected, part).bitmaps)
        assert torch.equal(getattr(found, part).labels, getattr(expected, part).labels)
    assert len(found.train) == 9


def test_a_folder_of_classes_stays_one_though_an_archive_lies_beside_them(tmp_path: Path) -> None:
    folder = packed(tmp_path / "plain", "folder")
    write_tar(folder / "backup.tar", [])
    assert list(find_pictures(folder)) == ["0", "1", "2"]


def test_a_shard_that_is_cut_anywhere_is_refused_by_name(tmp_path: Path) -> None:
    whole = (packed(tmp_path / "packed", "tar") / "part-1.tar").read_bytes()
    shard = tmp_path / "cut.tar"
    end = len(whole.rstrip(b"\0")) + 512
    for size in range(1, end - 1024, 499):
        shard.write_bytes(whole[:size])
        with pytest.raises(InvalidArgument, match=r"cut\.tar"):
            load_folder(shard, LOOK, held_out=0, seed=0, console=QUIET)


def test_a_broken_picture_is_named_with_its_place(tmp_path: Path) -> None:
    members = [m for n in "ab" for m in ((f"{n}.png", b"no picture"), (f"{n}.cls", n.encode()))]
    write_tar(tmp_path / "shard.tar", members)
    with pytest.raises(InvalidArgument, match=r"shard\.tar: a\.png at offset 0 .*shard\.tar: b\.png at offset 2048"):
        load_folder(tmp_path / "shard.tar", LOOK, held_out=0, seed=0, console=QUIET)


def test_a_payload_that_holds_the_magic_comes_back_whole(tmp_path: Path) -> None:
    base = encoded(glyph("A", 1), "BMP")
    noise = bytearray(base)
    noise[120:124] = noise[120 + 400 : 124 + 400] = MAGIC  # pixels; payload offset 24 + 120 is a multiple of four
    path = tmp_path / "a.rec"
    write_records(path, [(0, bytes(noise)), (1, bytes(noise))])
    assert path.read_bytes().count(MAGIC) > 5 + 2 * 2 - 1
    found = find_pictures(path)
    expected = np.asarray(Image.open(io.BytesIO(bytes(noise))))
    for pictures in found.values():
        assert np.array_equal(np.asarray(pictures[0].open()), expected)


def damaged(path: Path, what: str) -> str:
    """Damage the records or their index; return what the error must say."""
    offsets = write_records(path, labelled())
    data, index = bytearray(path.read_bytes()), path.with_suffix(".idx")
    third = offsets[3]
    if what == "magic":
        data[third] ^= 1
        expected = rf"train\.rec is damaged at offset {third}: .*0xced7230a"
    elif what == "length":
        data[third + 4 : third + 8] = struct.pack("<I", len(data))
        expected = rf"train\.rec is damaged at offset {third}: .*cut"
    elif what == "part":
        data[third + 7] |= 3 << 5
        expected = rf"offset {third}: part 3"
    elif what == "labels":
        data[third + 8 : third + 12] = struct.pack("<I", 2**32 - 1)
        expected = rf"offset {third}: .*4,294,967,295 labels"
    elif what == "class":
        data[third + 32 : third + 36] = struct.pack("<f", -0.5)
        expected = rf"offset {third}: the class is -0\.5"
    elif what == "cut":
        data = data[: offsets[-1] + 4]
        expected = rf"\.idx.*offset {offsets[-1]}"
    elif what == "short":
        data = data[:third]
        index.unlink()
        expected = "has 2 pictures, its record 0 says 12"
    elif what == "empty":
        data = bytearray()
        expected = "is empty"
    elif what == "index":
        index.write_text("0\t0\nx\t12\n")
        expected = r"\.idx, line 2, is b'x.t12'"
    else:
        index.write_text("0\t0\n1\t4\n")
        expected = r"offset 4: 0x.* should be"
    path.write_bytes(data)
    return expected


@pytest.mark.parametrize(
    "what", ["magic", "length", "part", "labels", "class", "cut", "short", "empty", "index", "foreign index"]
)
def test_damage_names_file_and_offset(what: str, tmp_path: Path) -> None:
    expected = damaged(tmp_path / "train.rec", what)
    with pytest.raises(InvalidArgument, match=expected):
        find_pictures(tmp_path / "train.rec")


def test_a_record_too_short_for_a_header_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.rec").write_bytes(record(image_record(0, 1, b"")[:10]))
    with pytest.raises(InvalidArgument, match="offset 0: a record of 10 bytes"):
        find_pictures(tmp_path / "a.rec")


def test_several_record_files_in_a_folder_need_a_choice(tmp_path: Path) -> None:
    for name in ("a.rec", "b.rec"):
        write_records(tmp_path / name, labelled())
    with pytest.raises(InvalidArgument, match=r"a\.rec, b\.rec"):
        find_pictures(tmp_path)
    assert json.dumps(list(find_pictures(tmp_path / "b.rec"))) == '["0", "1", "2"]'
