"""Archives of pictures that lie: each is refused by name, none is taken for something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from geartrain.ams.values.errors import InvalidArgument
from geartrain.workers.data.recordio import read_records
from geartrain.workers.data.webdataset import read_shards
from tests.support.face_files import encoded, glyph, image_record, record, write_records, write_tar

PICTURE = encoded(glyph("A", 0))


@pytest.mark.parametrize("label", [float("inf"), float("nan"), -1.0, 1.5, float(1 << 24), 3e38])
def test_a_class_that_a_float_cannot_tell_is_refused(label: float, tmp_path: Path) -> None:
    path = tmp_path / "train.rec"
    path.write_bytes(record(image_record(0, 0, PICTURE)) + record(image_record(label, 1, PICTURE)))
    with pytest.raises(InvalidArgument, match=r"train.rec is damaged at offset \d+: the class is .*16,777,215"):
        read_records(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("9\t{first}", "key 9 is at offset {first}, where another key is"),
        ("1\t{last}", "key 1 is there twice"),
        ("9\t{inside}", "is where a record's magic"),
        ("9\t99999996", "offset 99999996 of key 9 is no record"),
        ("9\t-4", "it must be 'key<tab>offset'"),
        ("9\t" + "4" * 5000, "it must be 'key<tab>offset'"),
    ],
)
def test_an_index_that_lies_is_refused(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "train.rec"
    offsets = write_records(path, [(0, PICTURE), (1, PICTURE)])
    names = {"first": offsets[1], "last": offsets[-1] + 400, "inside": offsets[1] + 4}
    with path.with_suffix(".idx").open("a") as index:
        index.write(line.format(**names) + "\n")
    with path.open("ab") as file:
        file.write(bytes(1000))
    with pytest.raises(InvalidArgument, match=message.format(**names)):
        read_records(path)


JSON_CLASSES: list[tuple[Any, str | None]] = [
    (3, "3"),
    (3.0, "3"),
    ("three", "three"),
    (2.5, None),
    ([3], None),
    ({"id": 3}, None),
    (True, None),
    ("", None),
    (float("inf"), None),
]


@pytest.mark.parametrize(("value", "name"), JSON_CLASSES)
def test_a_class_in_json_is_a_name_or_a_whole_number(value: Any, name: str | None, tmp_path: Path) -> None:
    shard = tmp_path / "a.tar"
    members = [
        ("1.png", PICTURE),
        ("1.json", json.dumps({"label": value}).encode()),
        ("2.png", PICTURE),
        ("2.cls", b"x"),
    ]
    write_tar(shard, members)
    if name is None:
        with pytest.raises(InvalidArgument, match=r"a.tar: 1.json at offset \d+ has no class"):
            read_shards([shard])
    else:
        assert set(read_shards([shard])) == {name, "x"}


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("1.json", b"[" * 500_000)], "has no class"),
        ([("1.json", b'{"label": ' + b"9" * 5000 + b"}")], "has no class"),
        ([("1.jpg", PICTURE), ("1.cls", b"0")], r"1.jpg at offset \d+ is a second picture of its sample"),
        ([("1.cls", b"0"), ("1.json", b'{"cls": 1}')], r"1.json at offset \d+ has class '1', another member '0'"),
        ([], r"a\.tar: sample '1' has a picture and no class; add 1\.cls"),
        ([("1.json", b'{"name": 3}')], "no class"),
        ([("1.json", b"{")], r"1\.json at offset \d+ has no class"),
        ([("1.cls", b" ")], r"1\.cls at offset \d+ is empty"),
        ([("1.cls", b"5")], "1 classes.*at least 2"),
    ],
)
def test_a_sample_that_contradicts_itself_or_tells_too_little_is_refused(
    members: list[tuple[str, bytes]], message: str, tmp_path: Path
) -> None:
    shard = tmp_path / "a.tar"
    write_tar(shard, [("0.png", PICTURE), ("0.cls", b"5"), ("1.png", PICTURE), *members])
    with pytest.raises(InvalidArgument, match=message):
        read_shards([shard])


@pytest.mark.parametrize("names", [["09", "9", "10", "9" * 5000], ["b", "z"]])
def test_classes_are_sorted_as_numbers_of_any_length_or_as_names(names: list[str], tmp_path: Path) -> None:
    shard = tmp_path / "a.tar"
    written = enumerate(reversed(names))
    write_tar(shard, [m for key, name in written for m in ((f"{key}.png", PICTURE), (f"{key}.cls", name.encode()))])
    assert list(read_shards([shard])) == names


def header(name: bytes, size: bytes, kind: bytes = b"0") -> bytes:
    """A tar header whose size is not what tarfile would write."""
    block = bytearray(512)
    block[: len(name)], block[100:108], block[124:136] = name, b"0000644\0", size
    block[136:148], block[156:157], block[257:265] = b"0" * 11 + b"\0", kind, b"ustar  \0"
    block[148:156] = b" " * 8
    block[148:156] = f"{sum(block):06o}\0 ".encode()
    return bytes(block)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "size", [-512, -1024, -(2**40), 2**60, 2**80], ids=["itself", "before", "far before", "huge", "no offset"]
)
def test_a_member_of_an_impossible_size_ends_in_an_error(size: int, tmp_path: Path) -> None:
    members = [(b"0.png", PICTURE), (b"0.cls", b"5")]
    whole = b"".join(header(name, b"%011o\0" % len(data)) + data + bytes(-len(data) % 512) for name, data in members)
    shard = tmp_path / "a.tar"
    encoding = (b"\x80" if size >= 0 else b"\xff") + (size % 256**11).to_bytes(11, "big")
    shard.write_bytes(whole + header(b"1.png", encoding) + bytes(2048))
    with pytest.raises(InvalidArgument, match=r"a\.tar"):
        read_shards([shard])
