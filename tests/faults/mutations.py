"""The suite's own mutations: each takes one mechanism out of the product, so that the attacks can show that they bite.

The product has no such switches: what is Python is patched, what is compiled is compiled anew with other words in it
(``mutated_core.py``), and only a process that begins can load that. ``GEARTRAIN_TEST_REMOVE=dedup make test`` runs
every test without one (this process only: not the roles that a test starts), and so does ``make campaign``.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import xxhash

from geartrain.ams.storage.durable import disk
from geartrain.ams.storage.snapshot import folder as snapshot_folder
from tests.faults.mutated_core import MODULE, VARIABLE, NoBuildFolder, core_without
from tests.faults.mutated_core import REMOVALS as COMPILED_REMOVALS


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


PATCHES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "checksum": _checksum,
    "rename last": _rename_last,
    "fsync": lambda patch: _no_sync(patch, lambda _: False),
    "fsync of files": lambda patch: _no_sync(patch, Path.is_dir),
    "fsync of folders": lambda patch: _no_sync(patch, lambda path: not path.is_dir()),
}


REMOVALS = (*COMPILED_REMOVALS, *PATCHES)
_HELD, _CAUGHT = 0, 3
"""Exit codes."""


def attack_without(mechanism: str, attack: Callable[..., None], seed: int, folder: Path) -> None:
    """Run an attack, a function of a module or a partial of one, with one mechanism taken out.

    Raises what it raises, AssertionError for that of a compiled mechanism, and KeyError for an unknown mechanism. Skips
    the test where the core was not built.
    """
    if mechanism not in COMPILED_REMOVALS:
        with pytest.MonkeyPatch.context() as patch:
            PATCHES[mechanism](patch)
            attack(seed, folder)
        return
    try:
        core_without([mechanism])
    except NoBuildFolder as exc:
        pytest.skip(str(exc))
    plain = attack.func if isinstance(attack, partial) else attack
    options = attack.keywords if isinstance(attack, partial) else {}
    told = json.dumps([plain.__module__, plain.__qualname__, seed, str(folder), options])
    code = "import sys; from tests.faults.mutations import attack_in_this_process as attack; attack(sys.argv[1])"
    ended = subprocess.run(
        [sys.executable, "-c", code, told],
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, VARIABLE: mechanism},
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode == _CAUGHT:
        raise AssertionError(ended.stderr[-4000:])
    if ended.returncode != _HELD:
        raise RuntimeError(ended.stderr[-4000:])


def attack_in_this_process(told: str) -> None:
    """Run the attack that :func:`attack_without` tells of, without what the environment names."""
    module, name, seed, folder, options = json.loads(told)
    with removed_by_environment():
        try:
            getattr(importlib.import_module(module), name)(seed, Path(folder), **options)
        except (AssertionError, BaseExceptionGroup):
            traceback.print_exc()
            sys.exit(_CAUGHT)


@contextmanager
def removed_by_environment() -> Iterator[None]:
    """Take out what ``GEARTRAIN_TEST_REMOVE`` names, separated by commas. Raises ValueError for an unknown name.

    What is compiled was taken out when this process loaded the core.
    """
    names = [name.strip() for name in os.environ.get(VARIABLE, "").split(",") if name.strip()]
    unknown = [name for name in names if name not in REMOVALS]
    if unknown:
        raise ValueError(f"{VARIABLE} names {unknown[0]!r}; it can be {', '.join(REMOVALS)}")
    if any(name in COMPILED_REMOVALS for name in names):
        assert "/mutants/" in str(importlib.import_module(MODULE).__file__), "the whole core was loaded first"
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            if name in PATCHES:
                PATCHES[name](patch)
        yield
