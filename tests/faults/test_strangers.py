"""What strangers say to a cluster under certificates ends no role and disturbs no client; more of it: the campaign."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.strangers import KINDS, Outcome, require_flat, run_strangers


def test_malformed_handshakes_frames_and_calls_of_every_kind_disturb_nobody(tmp_path: Path) -> None:
    outcome = Outcome()
    run_strangers(1, tmp_path / "run", outcome, attacks=4_000, windows=0)
    assert set(outcome.counts) == set(KINDS)
    assert min(outcome.counts.values()) >= 40 and outcome.honest_calls > 0
    require_flat(outcome)


def test_a_role_that_grows_or_keeps_files_open_is_found() -> None:
    flat = {"server 0": [100, 120, 120, 121, 120]}
    require_flat(Outcome(memory=flat, files={"server 0": [20, 31, 30, 30, 30]}))
    with pytest.raises(AssertionError, match="server 0 grows"):
        require_flat(Outcome(memory={"server 0": [100, 120, 140, 170, 205]}, files={"server 0": [20] * 5}))
    with pytest.raises(AssertionError, match="server 0 keeps files open"):
        require_flat(Outcome(memory=flat, files={"server 0": [20, 30, 40, 50, 60]}))
