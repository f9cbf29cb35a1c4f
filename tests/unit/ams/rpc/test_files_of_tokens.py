"""A role that wants tokens wants them until it ends, whatever becomes of the files while folders are copied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from geartrain.ams.rpc import tokens
from geartrain.ams.rpc.tokens import PUBLIC_FILE, REVOKED_FILE, Tokens
from geartrain.launch.certificates import create_authority
from geartrain.launch.tokens import create_token, revoke


def unheard(*_: Any, **__: Any) -> None:
    """No connection is made here."""


def test_files_that_go_away_open_nothing_and_revoke_nothing_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "_POLL_SECONDS", 0.0)
    create_authority(tmp_path, "test")
    before = Tokens(str(tmp_path), unheard)
    assert not before.are_wanted
    (good, _), (bad, bad_id) = (create_token(tmp_path, job, ["*=read"], 1.0) for job in ("good", "bad"))
    revoke(tmp_path, bad_id)
    for gone in ((), (REVOKED_FILE,), (PUBLIC_FILE,)):
        for name in gone:
            (tmp_path / name).unlink()
        assert before.are_wanted
        assert before.trusted(bad.read_text().strip()) == "its token was revoked"
        assert not isinstance(before.trusted(good.read_text().strip()), str)
        assert before.revoked.ids == (bad_id,)
    assert not Tokens(str(tmp_path), unheard).are_wanted
