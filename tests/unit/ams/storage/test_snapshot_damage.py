"""Whatever happens to a file of a snapshot is found, named, and never read as rows."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from geartrain.ams.storage.snapshot.folder import latest, list_snapshots, open_snapshot, prune
from geartrain.ams.storage.snapshot.manifest import MANIFEST
from geartrain.ams.values.errors import SnapshotDamaged, SnapshotOfOtherFormat

Take = Callable[..., Path]
Damage = Callable[[Path, random.Random], set[str]]


def flip_a_bit(folder: Path, chance: random.Random) -> set[str]:
    path = chance.choice(sorted(folder.iterdir()))
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)
    return {path.name}


def truncate(folder: Path, chance: random.Random) -> set[str]:
    path = chance.choice(sorted(folder.iterdir()))
    path.write_bytes(path.read_bytes()[: chance.randrange(1, path.stat().st_size)])
    return {path.name}


def empty(folder: Path, chance: random.Random) -> set[str]:
    path = chance.choice(sorted(folder.iterdir()))
    path.write_bytes(b"")
    return {path.name}


def lengthen(folder: Path, chance: random.Random) -> set[str]:
    path = chance.choice(sorted(folder.iterdir()))
    path.write_bytes(path.read_bytes() + bytes(chance.randrange(1, 9)))
    return {path.name}


def delete(folder: Path, chance: random.Random) -> set[str]:
    path = chance.choice(sorted(folder.iterdir()))
    path.unlink()
    return {path.name}


def make_it_a_folder(folder: Path, chance: random.Random) -> set[str]:
    path = chance.choice(sorted(folder.iterdir()))
    path.unlink()
    path.mkdir()
    return {path.name}


def swap_two(folder: Path, chance: random.Random) -> set[str]:
    first, second = chance.sample(sorted(folder.iterdir()), 2)
    aside = folder.with_name(".aside")
    first.rename(aside)
    second.rename(first)
    aside.rename(second)
    return {MANIFEST} if MANIFEST in (first.name, second.name) else {first.name, second.name}


def take_anothers(folder: Path, chance: random.Random) -> set[str]:
    path = chance.choice(sorted(folder.glob("*-*")))
    shutil.copyfile(folder.with_name("other") / path.name, path)
    return {path.name}


def add_one(folder: Path, chance: random.Random) -> set[str]:
    path = chance.choice(sorted(folder.with_name("other").glob("rows-*")))
    shutil.copyfile(path, folder / f"rows-extra-{chance.randrange(10)}.safetensors")
    return {"rows-extra-"}


DAMAGES: list[Damage] = [
    flip_a_bit,
    flip_a_bit,
    truncate,
    empty,
    lengthen,
    delete,
    make_it_a_folder,
    swap_two,
    take_anothers,
    add_one,
]


def found_in(folder: Path) -> list[SnapshotDamaged]:
    try:
        snapshot = open_snapshot(folder)
    except SnapshotDamaged as exc:
        return [exc]
    return snapshot.verify()


def test_three_hundred_damages_are_all_found_and_named(tmp_path: Path, take: Take) -> None:
    whole = take(tmp_path, "whole", step=1)
    take(tmp_path, "other", step=2)
    assert found_in(whole) == []
    for seed in range(300):
        damage = DAMAGES[seed % len(DAMAGES)]
        folder = tmp_path / "damaged"
        shutil.copytree(whole, folder)
        names = damage(folder, random.Random(seed))
        found = [str(exc) for exc in found_in(folder)]
        for name in names:
            assert any(f"{folder}/{name}" in message for message in found), (seed, damage, name, found)
        assert len(found) == len(names), (seed, damage, found)
        shutil.rmtree(folder)


def test_every_bit_of_a_manifest_counts(tmp_path: Path, take: Take) -> None:
    path = take(tmp_path, "a") / MANIFEST
    data = path.read_bytes()
    start = data.index(b'"job": {')
    for position in [*range(40), *range(start, start + 80), *range(len(data) - 60, len(data))]:
        for bit in range(8):
            changed = bytearray(data)
            changed[position] ^= 1 << bit
            path.write_bytes(changed)
            with pytest.raises(SnapshotDamaged, match=r"manifest\.json"):
                open_snapshot(path.parent)


def test_no_array_of_a_damaged_block_is_returned(tmp_path: Path, take: Take) -> None:
    snapshot = open_snapshot(take(tmp_path, "a"))
    entry = next(entry for entry in snapshot.manifest.files if entry.table == "sku" and entry.shard == 1)
    path = snapshot.path / entry.path
    path.write_bytes(path.read_bytes()[:-1] + b"\x55")
    with pytest.raises(SnapshotDamaged, match=r"8 rows \(rows, block 0\) of table 'sku' on shard 1") as raised:
        snapshot.read(entry)
    assert str(path) in str(raised.value)
    with pytest.raises(SnapshotDamaged):
        snapshot.read_bytes(entry)


def test_swapped_blocks_say_what_lies_there_instead(tmp_path: Path, take: Take) -> None:
    snapshot = open_snapshot(take(tmp_path, "a"))
    first, second = (entry for entry in snapshot.manifest.files if entry.table == "sku" and entry.index == 0)
    shutil.copyfile(snapshot.path / second.path, snapshot.path / first.path)
    (found,) = snapshot.verify()
    assert f"it says that it is rows, block 0 of table 'sku' on shard {second.shard}" in str(found)


def test_progress_is_told_in_bytes(tmp_path: Path, take: Take) -> None:
    snapshot = open_snapshot(take(tmp_path, "a"))
    told: list[tuple[int, int]] = []
    snapshot.verify(lambda done, total: told.append((done, total)))
    total = sum(entry.bytes for entry in snapshot.manifest.files)
    assert len(told) == len(snapshot.manifest.files)
    assert told[-1] == (total, total)


def test_another_format_is_refused_by_name(tmp_path: Path, take: Take) -> None:
    from geartrain.ams.storage.snapshot import manifest as m

    path = take(tmp_path, "a") / MANIFEST
    content = open_snapshot(path.parent).manifest.model_dump(mode="json")
    path.write_bytes(m.seal_json({**content, "format": 6, "new": []}))
    with pytest.raises(SnapshotOfOtherFormat, match=r"a/manifest\.json has format 6; .* reads format 1\. Use"):
        open_snapshot(path.parent)
    take(tmp_path, "older", step=0)
    assert [listed.name for listed in list_snapshots(tmp_path)] == ["a", "older"]
    with pytest.raises(SnapshotOfOtherFormat, match="format 6"):
        latest(tmp_path)
    assert latest(tmp_path, allow_fallback=True).name == "older"
    assert prune(tmp_path, 1) == [] and path.exists()


@pytest.mark.parametrize("change", [{"placement": ""}, {"placement": "AAA="}, {"placement": "%"}, {"num_shards": 1}])
def test_a_manifest_whose_bucket_map_is_none_is_damaged(tmp_path: Path, take: Take, change: dict[str, object]) -> None:
    from geartrain.ams.storage.snapshot import manifest as m

    path = take(tmp_path, "a") / MANIFEST
    content = open_snapshot(path.parent).manifest.model_dump(mode="json")
    path.write_bytes(m.seal_json({**content, **change}))
    with pytest.raises(SnapshotDamaged, match="its content is not legal"):
        open_snapshot(path.parent)


@pytest.mark.parametrize(
    "content", [b"[]", b"null", b"{}", b"\xff", b"[" * 100_000, b'{"xxh3_128": NaN}', b'"\\ud800"']
)
def test_any_bytes_for_a_manifest_are_a_typed_error(tmp_path: Path, take: Take, content: bytes) -> None:
    path = take(tmp_path, "a") / MANIFEST
    path.write_bytes(content)
    with pytest.raises(SnapshotDamaged, match=r"manifest\.json"):
        open_snapshot(path.parent)
    (listed,) = list_snapshots(tmp_path)
    assert listed.snapshot is None
    assert "manifest.json" in str(listed.damage)


def test_a_damaged_newest_is_not_passed_over_silently(
    tmp_path: Path, take: Take, caplog: pytest.LogCaptureFixture
) -> None:
    take(tmp_path, "old", step=1)
    new = take(tmp_path, "new", step=2)
    assert latest(tmp_path).name == "new"
    for path in sorted(new.glob("rows-*"))[:2]:
        path.unlink()
    with pytest.raises(SnapshotDamaged, match=r"'new'.*2 damaged files.*allow_fallback=True"):
        latest(tmp_path)
    assert latest(tmp_path, allow_fallback=True).name == "old"
    assert "passed over" in caplog.text


def test_where_nothing_is_sound_fallback_says_so(tmp_path: Path, take: Take) -> None:
    for name in ("a", "b"):
        (take(tmp_path, name) / MANIFEST).write_bytes(b"")
    with pytest.raises(SnapshotDamaged, match=r"none of the snapshots.*/b/.*/a/"):
        latest(tmp_path, allow_fallback=True)
