"""One contract for every store; then what only a disk can do."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import lmdb
import pytest

from geartrain.ams.storage.kv import lmdb_file
from geartrain.ams.storage.kv.lmdb_store import LmdbStore
from geartrain.ams.storage.kv.store import KeyValueStore, MemoryStore, seal, unseal
from geartrain.ams.values.errors import ConfigError, InternalError, StateDamaged, StateFailed

FLIPS = 30


@pytest.fixture(params=["memory", "lmdb"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> KeyValueStore:
    return MemoryStore() if request.param == "memory" else LmdbStore(tmp_path)


def test_a_store_shows_what_was_last_written(store: KeyValueStore) -> None:
    assert store.read_all() == {}
    store.write({"a": b"1", "b/ü": b""})
    store.write({"a": b"2", "b/ü": None, "c": None})
    assert store.read_all() == {"a": b"2"}
    store.close()
    store.close()


def filled(folder: Path) -> dict[str, bytes]:
    store = LmdbStore(folder)
    for number in range(40):
        store.write({f"key/{number % 20}": f"value {number} ".encode() * 20})
    values = store.read_all()
    store.close()
    return values


def test_lmdb_keeps_what_was_written_and_grows(tmp_path: Path) -> None:
    values = filled(tmp_path)
    store = LmdbStore(tmp_path)
    assert store.read_all() == values
    store.write({"large": bytes(24 << 20)})
    store.close()
    reopened = LmdbStore(tmp_path)
    assert reopened.read_all() == values | {"large": bytes(24 << 20)}
    reopened.close()


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path)
    with pytest.raises(ConfigError, match="in use by another live process"):
        LmdbStore(tmp_path)
    store.close()
    LmdbStore(tmp_path).close()


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=r"cannot be used \(File exists\); give a folder where you may write"):
        LmdbStore(tmp_path / "file")


def test_a_sealed_value_under_another_key_is_found() -> None:
    assert unseal("a", seal("a", b"v"), "here") == b"v"
    for sealed in (seal("b", b"v"), seal("a", b"v")[:7], seal("a", b"v") + b"x"):
        with pytest.raises(StateDamaged, match="here: the value of key 'a' is damaged"):
            unseal("a", sealed, "here")


def test_a_damaged_value_is_named_by_its_key(tmp_path: Path) -> None:
    filled(tmp_path)
    path = tmp_path / "state.lmdb"
    path.write_bytes(path.read_bytes().replace(b"value 33 ", b"value 32 "))  # in old copies of the page too
    with pytest.raises(StateDamaged, match=r"state\.lmdb: the value of key 'key/13' is damaged"):
        LmdbStore(tmp_path)


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["state.lmdb", "revision"])
def test_no_bit_flip_is_silent(tmp_path: Path, name: str) -> None:
    values = filled(tmp_path / "whole")
    rng = random.Random(7)
    size = (tmp_path / "whole" / name).stat().st_size
    found = 0
    for turn in range(FLIPS if name == "state.lmdb" else 10):
        folder = tmp_path / str(turn)
        shutil.copytree(tmp_path / "whole", folder)
        # Every other one in the first pages, which hold the root of the tree.
        flip(folder / name, rng.randrange(8 * (size if turn % 2 else min(size, 200))))
        try:
            store = LmdbStore(folder)
        except StateDamaged:
            found += 1
            continue
        assert store.read_all() == values  # it hit what nobody reads
        store.close()
        shutil.rmtree(folder)
    assert found >= 2


def test_a_size_beyond_the_file_is_found_before_it_is_followed(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path)
    store.write({"large": bytes(20_000)})
    store.close()
    path = tmp_path / "state.lmdb"
    damaged = bytearray(path.read_bytes())
    size = damaged.index(b"large") - 8  # LMDB's node: the size in two halves, flags, size of the key, the key
    assert 20_000 < int.from_bytes(damaged[size : size + 4], "little") < 21_000
    damaged[size : size + 4] = (200_000).to_bytes(4, "little")
    path.write_bytes(damaged)
    opens = f"from geartrain.ams.storage.kv.lmdb_store import LmdbStore; LmdbStore({str(tmp_path)!r})"
    opened = subprocess.run([sys.executable, "-c", opens], capture_output=True, text=True, check=False)  # may die of it
    assert opened.returncode == 1 and "StateDamaged" in opened.stderr, (opened.returncode, opened.stderr)


def raw(folder: Path) -> lmdb.Environment:
    return lmdb.open(str(folder / "state.lmdb"), subdir=False, lock=False)


def test_a_key_that_is_gone_is_noticed(tmp_path: Path) -> None:
    filled(tmp_path)
    with raw(tmp_path) as environment, environment.begin(write=True) as transaction:
        transaction.delete(b"key/3")
    with pytest.raises(StateDamaged, match="keys are missing"):
        LmdbStore(tmp_path)


def test_an_older_file_put_in_its_place_is_noticed(tmp_path: Path) -> None:
    filled(tmp_path)
    older = (tmp_path / "state.lmdb").read_bytes()
    store = LmdbStore(tmp_path)
    store.write({"a": b"1"})
    store.close()
    (tmp_path / "state.lmdb").write_bytes(older)
    with pytest.raises(StateDamaged, match="it is at revision 40, but 41 was acknowledged"):
        LmdbStore(tmp_path)
    (tmp_path / "state.lmdb").unlink()
    with pytest.raises(StateDamaged):
        LmdbStore(tmp_path)


@pytest.mark.parametrize("call", ["_commit", "_write_revision"])
def test_after_a_failed_write_nothing_more_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    filled(tmp_path)
    store = LmdbStore(tmp_path)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, call, fail)
    with pytest.raises(StateFailed, match="No space left"):
        store.write({"a": b"1"})
    monkeypatch.undo()
    with pytest.raises(StateFailed, match="start this role again"):
        store.write({"a": b"1"})
    store.close()
    again: Callable[[], None] = LmdbStore(tmp_path).close
    again()


def test_a_store_whose_revision_is_gone_is_not_believed(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path)
    store.write({"a": b"1"})
    store.close()
    (tmp_path / "revision").unlink()
    with pytest.raises(StateDamaged, match=r"revision.*is missing"):
        LmdbStore(tmp_path)


def test_a_death_while_the_first_revision_is_written_leaves_a_store_that_opens(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path)
    store.close()
    (tmp_path / "revision").unlink()
    (tmp_path / "revision.new").write_bytes(b"")  # made, and not yet written
    again = LmdbStore(tmp_path)
    again.write({"a": b"1"})
    again.close()
    assert LmdbStore(tmp_path).read_all() == {"a": b"1"}


def test_who_ends_the_look_through_a_file_says_nothing_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "data.mdb"
    file.write_bytes(b"anything")
    kill = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]
    run = subprocess.run
    monkeypatch.setattr(lmdb_file.subprocess, "run", lambda _, **how: run(kill, **how))
    with pytest.raises(InternalError, match=r"ended by signal 9.*Start again"):
        lmdb_file.check_structure(file, "give it up", first_map_bytes=1 << 20)
