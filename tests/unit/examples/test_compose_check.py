"""``make compose-check`` beside a cluster of the user: its project is its own, and it says what is not ready."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FAKE = """#!/bin/sh
echo "$COMPOSE_PROJECT_NAME $*" >> "$CALLS"
case "$*" in *health*) echo "told: $*" >&2; exit 1 ;; *status*) echo "told by status" ;; esac
"""


def test_a_check_that_fails_says_what_is_not_ready_and_touches_only_its_own_project(tmp_path: Path) -> None:
    compose, sleep, calls = tmp_path / "compose", tmp_path / "sleep", tmp_path / "calls"
    compose.write_text(FAKE, encoding="utf-8")
    sleep.write_text("#!/bin/sh\n", encoding="utf-8")
    for program in (compose, sleep):
        program.chmod(0o755)
    settings = {"COMPOSE": str(compose), "CALLS": str(calls), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ended = subprocess.run(
        [ROOT / "scripts" / "compose_check.sh"],
        env={**os.environ, "COMPOSE_PROJECT_NAME": "geartrain", **settings},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 1
    for words in ("not ready after a minute", "--service complete", "told by status"):
        assert words in ended.stderr
    made = calls.read_text("utf-8").splitlines()
    (project,) = {call.split()[0] for call in made}
    assert re.fullmatch("geartrain-check-[0-9]+", project)
    assert made[-1].endswith("down -v --remove-orphans")


def test_what_pages_say_of_containers_that_are_run_on_demand_names_their_profile() -> None:
    """podman-compose finds them in no other way."""
    pages = [ROOT / "docker-compose.yml", *(ROOT / "docs").rglob("*.md")]
    found = [line for page in pages for line in re.findall(r"docker compose .*run .*", page.read_text("utf-8"))]
    assert found
    assert all("--profile" in line for line in found), found
