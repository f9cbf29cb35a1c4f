"""The campaign's runner: results are added up, failures name the command that repeats them, nothing done is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from geartrain.ams.values.config import CLIENT, FOLDER_VARIABLE
from geartrain.launch.certificates import create_authority, issue
from tests.faults.campaign import UNEXPLAINED

COMMAND = (sys.executable, "-m", "tests.faults.campaign")


def results(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))["faults"]


def run(path: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, "--results", str(path), *arguments],
        env={**os.environ, "COLUMNS": "200", **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_campaign_adds_to_the_ones_before_it_with_new_seeds(tmp_path: Path) -> None:
    path = tmp_path / "campaign.json"
    for times in (1, 2):
        ended = run(path, "--only=damage", "--budget-minutes=0", "--jobs=1")
        assert ended.returncode == 0, ended.stderr
        tally = results(path)["damage"]
        assert (tally["runs"], tally["units"], tally["last_seed"]) == (times, 250 * times, times)
        assert (tally["failures"], tally["failed_seeds"]) == (0, {})


def test_a_failure_is_recorded_with_its_seed_and_names_the_command_that_repeats_it(tmp_path: Path) -> None:
    path = tmp_path / "campaign.json"
    ended = run(path, "--only=damage", "--budget-minutes=0", "--jobs=1", GEARTRAIN_TEST_REMOVE="checksum")
    assert ended.returncode == 1
    assert "make campaign ONLY=damage SEED=1" in ended.stderr
    assert results(path)["damage"]["failed_seeds"] == {"1": UNEXPLAINED}
    again = run(path, "--only=damage", "--seed=1", GEARTRAIN_TEST_REMOVE="checksum")
    assert again.returncode == 1
    assert "AssertionError" in again.stderr
    assert results(path)["damage"]["runs"] == 1


def test_certificates_of_this_user_do_not_reach_the_cluster_of_an_attack(tmp_path: Path) -> None:
    folder = tmp_path / "geartrain" / "security"
    create_authority(folder, "local")
    issue(folder, folder, [CLIENT])
    variables = {name: value for name, value in os.environ.items() if name != FOLDER_VARIABLE}
    ended = subprocess.run(
        [*COMMAND, "--only=bulk", "--seed=1"],
        env=variables | {"XDG_DATA_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_an_interrupt_keeps_what_was_done(tmp_path: Path) -> None:
    path = tmp_path / "campaign.json"
    process = subprocess.Popen(
        [*COMMAND, "--results", str(path), "--only=damage", "--budget-minutes=5", "--jobs=1"],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while not path.exists():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, said
    assert "what was done is recorded" in said
    assert results(path)["damage"]["runs"] >= 1


def test_a_seed_of_no_fault_is_a_usage_error(tmp_path: Path) -> None:
    ended = run(tmp_path / "campaign.json", "--seed=1")
    assert ended.returncode == 2
    assert "--seed needs --only" in ended.stderr
