"""Attacks that run in this process: ``attack(seed, folder)`` raises an error if a promise is broken.

Each is run as it is by a test or by the campaign, and with a mechanism of the product removed by ``test_the_suite.py``,
where it must raise.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from geartrain.ams.storage.durable import disk
from geartrain.ams.storage.snapshot.folder import list_snapshots
from geartrain.ams.values.errors import InternalError
from tests.faults.power import Names, PowerLost, VolatileDisk
from tests.unit.ams.storage.conftest import take_snapshot
from tests.unit.ams.storage.test_snapshot_damage import DAMAGES, found_in

Attack = Callable[[int, Path], None]


def sequences(seed: int, folder: Path, *, examples: int = 60) -> None:  # noqa: ARG001
    """Random sequences of writes, losses, deaths, snapshots and restores over a simulated cluster."""
    from tests.model.run import run

    try:
        run(examples, seed, shrink=False)
    except InternalError as exc:  # the oracle objected in the middle of a call, which must not leave its caller waiting
        raise AssertionError(str(exc)) from exc


def large_requests(seed: int, folder: Path) -> None:  # noqa: ARG001
    """Large assigns of two clients and small pulls of a third, over shared memory."""
    from tests.unit.ams.server.test_large_requests import attack

    attack("ring", 1, rounds=100)


def proxies(seed: int, folder: Path, *, pushes: int = 120) -> None:  # noqa: ARG001
    """Integer pushes through proxies that mistreat the connections for rows, and those of messages."""
    from tests.faults.test_exactly_once import attack

    rows, expected, _ = attack(seed, pushes)
    np.testing.assert_array_equal(rows, expected)


def shared_memory(seed: int, folder: Path, *, pushes: int = 20) -> None:  # noqa: ARG001
    """Integer pushes by way of shared memory, whose connections end and whose shards stop answering meanwhile."""
    from tests.faults.test_exactly_once import attack

    rows, expected, _ = attack(seed, pushes, carrier="shared")
    np.testing.assert_array_equal(rows, expected)


def scenario(seed: int, folder: Path, *, name: str) -> None:
    """What happens at a failpoint; see ``scenarios.py``."""
    from tests.faults.scenarios import run_scenario

    outcome = run_scenario(name, seed, folder)
    assert outcome.held, f"fired: {outcome.fired}, wrong rows: {outcome.wrong_rows > 0}"


def damage(seed: int, folder: Path, *, times: int = 40) -> None:
    """Damage a snapshot so many times, each time in one way; it must be found and named."""
    whole = take_snapshot(folder, "whole", step=1)
    take_snapshot(folder, "other", step=2)
    damage_copies(whole, range(seed * times, (seed + 1) * times))


def damage_copies(whole: Path, seeds: range) -> None:
    """Damage a copy of ``whole`` for each seed; a snapshot ``other`` lies beside it."""
    for seed in seeds:
        kind = DAMAGES[seed % len(DAMAGES)]
        damaged = whole.with_name("damaged")
        shutil.rmtree(damaged, ignore_errors=True)
        shutil.copytree(whole, damaged)
        names = kind(damaged, random.Random(seed))
        found = [str(exc) for exc in found_in(damaged)]
        for name in names:
            assert any(f"{damaged}/{name}" in message for message in found), (seed, kind.__name__, name, found)
        assert len(found) == len(names), (seed, kind.__name__, found)


def death_of_a_writer(seed: int, folder: Path) -> None:  # noqa: ARG001
    """The process that writes a snapshot dies before any call to the disk; only whole snapshots are ever listed."""
    at, has_ended = 1, False
    while not has_ended:
        root = folder / str(at)
        take_snapshot(root, "previous", step=1)
        with pytest.MonkeyPatch.context() as patch:
            calls = _Deadline(patch, at)
            try:
                take_snapshot(root, "next", step=2)
                has_ended = True
            except PowerLost:
                pass
        assert calls.count >= at or has_ended
        _require_whole(root, {"previous", "next"} if has_ended else {"previous"})
        at += 1


def power_loss(seed: int, folder: Path) -> None:  # noqa: ARG001
    """The power goes before any call to the disk, and once all is done; what was synced is all there is."""
    at, has_ended = 1, False
    while not has_ended:
        root = folder / str(at)
        root.mkdir()
        with pytest.MonkeyPatch.context() as patch:
            volatile = VolatileDisk(patch, root)
            take_snapshot(root, "previous", step=1)
            _Deadline(patch, at)
            try:
                take_snapshot(root, "next", step=2)
                has_ended = True
            except PowerLost:
                pass
        names: Names
        for names in ("synced names", "all names"):
            left = volatile.after_the_loss(folder / f"{at} {names}", names)
            _require_whole(left, {"previous", "next"} if has_ended else {"previous"})
        volatile.close()
        at += 1


class _Deadline:
    """Lets the calls to the disk from the one numbered ``at`` on (from 1) be the end of the process."""

    def __init__(self, patch: pytest.MonkeyPatch, at: int) -> None:
        self.count = 0
        for name in ("create_folder", "write", "sync", "rename", "remove_folder"):
            patch.setattr(disk, name, self._counted(getattr(disk, name), at))

    def _counted(self, whole: Callable[..., None], at: int) -> Callable[..., None]:
        def call(*arguments: object) -> None:
            self.count += 1
            if self.count >= at:
                raise PowerLost
            whole(*arguments)

        return call


def _require_whole(root: Path, expected: set[str]) -> None:
    listed = list_snapshots(root)
    for item in listed:
        assert item.snapshot is not None, f"{item.name} is listed and is no snapshot: {item.damage}"
        assert item.snapshot.verify() == [], f"{item.name} is listed and damaged"
    assert expected <= {item.name for item in listed} <= {"previous", "next"}, f"{expected} are not all there"
