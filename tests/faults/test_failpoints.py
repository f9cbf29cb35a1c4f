"""Every failpoint, once with SIGKILL of a real process and once with another action; see ``scenarios.py``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from geartrain.ams.observe.failpoints import FAILPOINTS
from geartrain.ams.storage.snapshot import store as snapshot_store
from geartrain.ams.storage.snapshot.manifest import MANIFEST
from tests.faults import attacks
from tests.faults.mutations import attack_without
from tests.faults.scenarios import ELSEWHERE, PLACES, actions_of, run_scenario

KILL, OTHER = 0, 1
"""Seeds: the first action is always ``kill``."""
GO_ON = [name for name in PLACES if actions_of(name)[OTHER % len(actions_of(name))] not in ("kill", "exit")]


def test_every_failpoint_has_a_scenario() -> None:
    assert {*PLACES, *ELSEWHERE} == set(FAILPOINTS)


@pytest.mark.parametrize("name", PLACES)
def test_nothing_is_lost_or_doubled_when_a_process_dies_at(name: str, tmp_path: Path) -> None:
    outcome = run_scenario(name, KILL, tmp_path)
    assert "=kill@" in outcome.armed
    assert outcome.held, outcome


@pytest.mark.parametrize("name", GO_ON)
def test_nothing_is_lost_or_doubled_when_something_fails_or_stalls_at(name: str, tmp_path: Path) -> None:
    outcome = run_scenario(name, OTHER, tmp_path)
    assert outcome.held, outcome


def test_the_scenarios_find_a_shard_that_forgets_what_it_applied(tmp_path: Path) -> None:
    answered = partial(attacks.scenario, name="client.reply.after")
    attack_without("dedup", answered, OTHER, tmp_path / "answered")  # what was answered is not sent again
    unanswered = partial(attacks.scenario, name="shard.reply.before")
    with pytest.raises(AssertionError, match="fired: True, wrong rows: True"):
        attack_without("dedup", unanswered, OTHER, tmp_path / "unanswered")


def test_the_scenarios_find_a_snapshot_that_appears_before_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = snapshot_store._LocalStore
    publish = store.publish

    def early(self: Any, staging: Path, final: Path) -> None:
        (Path(staging) / MANIFEST).rename(Path(staging) / ".later")
        publish(self, staging, final)
        (Path(final) / ".later").rename(Path(final) / MANIFEST)

    monkeypatch.setattr(store, "publish", early)
    monkeypatch.setattr(store, "_discard", lambda *_: None)
    outcome = run_scenario("snapshot.rename.after", OTHER, tmp_path)
    assert outcome.fired
    assert outcome.damage
