"""Clients at work at once leave every row as it should be."""

from __future__ import annotations

from pathlib import Path

from tests.model.threads import run_threads


def test_what_clients_do_at_once_adds_up(tmp_path: Path) -> None:
    run_threads(0, tmp_path, rounds=40)
