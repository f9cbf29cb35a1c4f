"""What on-call people are given: rules, their runbooks, the dashboard. For real it is ``make watch-check``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from scripts import watch_check
from tests.support.movielens_files import write_movielens

REPOSITORY = Path(__file__).resolve().parents[3]
RULES = yaml.safe_load(watch_check.RULES.read_text(encoding="utf-8"))
ALERTS = [rule for group in RULES["groups"] for rule in group["rules"] if "alert" in rule]


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^## (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^a-z0-9 ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_alert_has_its_runbook_and_every_runbook_an_alert() -> None:
    page = REPOSITORY / "docs" / "how-to" / "on-call.md"
    named = [rule["annotations"]["runbook"] for rule in ALERTS]
    assert {str(page.relative_to(REPOSITORY))} == {name.partition("#")[0] for name in named}
    assert {name.partition("#")[2] for name in named} == anchors(page)
    assert len(anchors(page)) == 15


def test_rules_and_panels_ask_for_families_that_there_are() -> None:
    page = (REPOSITORY / "docs" / "explanation" / "metrics.md").read_text(encoding="utf-8")
    there = set(re.findall(r"(?:geartrain|process)_\w+", page))
    asked = " ".join(
        [
            *(rule["expr"] for group in RULES["groups"] for rule in group["rules"]),
            *dict.fromkeys(query for _, query in watch_check.panels()),
        ]
    )
    names = {re.sub("_(bucket|sum|count)$", "", name) for name in re.findall(r"(?:geartrain|process)_\w+", asked)}
    assert len(names) > 20
    assert names <= there, names - there


def test_alerts_fire_when_they_should_and_not_before() -> None:
    if why := watch_check.missing():
        pytest.skip(why)
    watch_check.check_rules()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_panel_has_data_and_every_alert_fires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if why := watch_check.missing():
        pytest.skip(why)
    monkeypatch.setenv("GEARTRAIN_SECURITY__FOLDER", "none")
    watch_check.check(tmp_path, str(write_movielens(tmp_path / "films")))
