"""The suite's own mutations: each takes one mechanism out of the product, so that the attacks can show that they bite.

Monkeypatches only; the product has no such switches. ``GEARTRAIN_TEST_REMOVE=dedup make test`` runs every test without
one (this process only: not the roles that a test starts), and so does ``make campaign``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import xxhash

from geartrain.ams.rpc.payload.shared_memory import HeldSegments
from geartrain.ams.server import completed_writes
from geartrain.ams.server.completed_writes import CompletedWrites
from geartrain.ams.server.shard import Shard
from geartrain.ams.storage.durable import disk
from geartrain.ams.storage.snapshot import folder as snapshot_folder
from geartrain.ams.values.shard_messages import CallContext, Done


def _dedup(patch: pytest.MonkeyPatch) -> None:
    """A shard forgets what it applied."""
    whole = CompletedWrites.applied

    def forgetting(self: CompletedWrites, context: CallContext, done: Done, table: str) -> None:
        whole(self, context, done, table)
        self._streams[context.stream].done.clear()

    patch.setattr(CompletedWrites, "applied", forgetting)


def _shard_fence(patch: pytest.MonkeyPatch) -> None:
    """A shard answers calls that mean the one before it."""
    patch.setattr(Shard, "check_fence", lambda *_: None)


def _client_fence(patch: pytest.MonkeyPatch) -> None:
    """A shard takes writes of a process that was replaced."""

    def unfenced(self: CompletedWrites, context: CallContext) -> Any:
        return self._streams.setdefault(context.stream, completed_writes._WriteStream())

    patch.setattr(CompletedWrites, "_current", unfenced)


class _EqualToAll(str):
    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = str.__hash__


def _checksum(patch: pytest.MonkeyPatch) -> None:
    """Whatever is read has the hash that the manifest says. What is written gets its true one."""
    whole = xxhash.xxh3_128_hexdigest
    patch.setattr(xxhash, "xxh3_128_hexdigest", lambda *arguments: _EqualToAll(whole(*arguments)))


def _rename_last(patch: pytest.MonkeyPatch) -> None:
    """A snapshot has its final name from the first, and is written there."""
    create, rename = disk.create_folder, disk.rename

    def published(path: Path) -> None:
        if not path.name.startswith(".staging-"):
            create(path)
            return
        final = path.with_name(path.name.removeprefix(".staging-").rsplit("-", 1)[0])
        create(final)
        path.symlink_to(final)

    def nothing_left_to_do(source: Path, target: Path) -> None:
        if source.is_symlink():
            source.unlink()
        else:
            rename(source, target)

    patch.setattr(disk, "create_folder", published)
    patch.setattr(disk, "rename", nothing_left_to_do)
    patch.setattr(snapshot_folder, "_require_free", lambda *_: None)


def _no_sync(patch: pytest.MonkeyPatch, spared: Callable[[Path], bool]) -> None:
    sync = disk.sync

    def forgotten(descriptor: int, path: Path) -> None:
        if spared(path):
            sync(descriptor, path)

    patch.setattr(disk, "sync", forgotten)


def _one_use(patch: pytest.MonkeyPatch) -> None:
    """A shard works in shared memory whenever a call says so, however often that call arrives."""
    patch.setattr(HeldSegments, "claim", lambda self, name, _: self._held[name].memory)


VARIABLE = "GEARTRAIN_TEST_REMOVE"
REMOVALS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "dedup": _dedup,
    "shard fence": _shard_fence,
    "client fence": _client_fence,
    "one use": _one_use,
    "checksum": _checksum,
    "rename last": _rename_last,
    "fsync": lambda patch: _no_sync(patch, lambda _: False),
    "fsync of files": lambda patch: _no_sync(patch, Path.is_dir),
    "fsync of folders": lambda patch: _no_sync(patch, lambda path: not path.is_dir()),
}


@contextmanager
def removed(name: str) -> Iterator[None]:
    """Take one mechanism out while the block runs. Raises KeyError for an unknown name."""
    with pytest.MonkeyPatch.context() as patch:
        REMOVALS[name](patch)
        yield


@contextmanager
def removed_by_environment() -> Iterator[None]:
    """Take out what ``GEARTRAIN_TEST_REMOVE`` names, separated by commas. Raises ValueError for an unknown name."""
    names = [name.strip() for name in os.environ.get(VARIABLE, "").split(",") if name.strip()]
    unknown = [name for name in names if name not in REMOVALS]
    if unknown:
        raise ValueError(f"{VARIABLE} names {unknown[0]!r}; it can be {', '.join(REMOVALS)}")
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(removed(name))
        yield
