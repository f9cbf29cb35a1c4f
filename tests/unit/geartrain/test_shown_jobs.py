"""Jobs and events as commands print them."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console
from rich.text import Text

from geartrain.ams.values.errors import GeartrainError
from geartrain.ams.values.scheduler_messages import ClusterEvent, JobEntry, JobReport
from geartrain.cli.cluster.events import line_of
from geartrain.cli.cluster.status import job_lines
from geartrain.cli.cluster.top import _stale
from geartrain.cli.shared.consoles import table_of
from geartrain.watch.events import folded


def test_a_job_has_room_on_a_terminal_and_no_text_looks_like_two_events() -> None:
    report = JobReport(state="training", step=12_345, last_step=20_000, steps_per_second=9.4, loss=0.8412)
    report = replace(report, metric="AUC", metric_value=0.912, samples_per_second=1203.2, pull_ms=1.24, push_ms=0.31)
    report = replace(report, metrics={"grouped auc": 0.75, "log loss": 0.5})
    entry = JobEntry(
        job="run-029e5708",
        report=replace(report, snapshot_every_seconds=11.0),
        heard_seconds_ago=1.0,
        step_seconds_ago=0.0,
        snapshot_step=12_300,
        snapshot_seconds_ago=49.0,
        snapshot_failures={"SnapshotFailed": 2},
        recoveries=2,
        steps_lost=114,
    )
    lines = list(job_lines(entry))
    assert lines == [
        "run-029e5708: training, step 12,345 of 20,000 (61 %), 0 s ago, 14 min left",
        "  loss 0.8412, AUC 0.9120, 9.4 steps/s, 1,203 samples/s, pull 1.2 + push 0.3 ms",
        "  grouped auc 0.7500, log loss 0.5000",
        "  snapshot of step 12,300, 49 s ago, every 11 s; failed: 2 SnapshotFailed",
        "  went back 2 times, 114 steps lost",
    ]
    assert max(map(len, lines)) <= 80
    silent = replace(entry, report=replace(report, state="silent"), heard_seconds_ago=31.0)
    assert next(job_lines(silent)).startswith("run-029e5708: silent for 31 s, step 12,345")
    assert "\n" not in line_of(ClusterEvent(kind="snapshot", text="whole\n     9 2026-01-01 lost  shard 0"))


def test_tables_that_are_dropped_one_after_another_are_one_line_and_a_crash_stays_another() -> None:
    drops = [
        ClusterEvent(kind="schema", text=f"table t{number} dropped", tables=(f"t{number}",), number=number)
        for number in range(1, 37)
    ]
    lost = ClusterEvent(kind="lost", text="shard 0 is lost", number=20)
    made = ClusterEvent(kind="schema", text="table u made", tables=("u",), number=37)
    shown = list(folded([*drops[:19], lost, *drops[20:], made]))
    assert [event.text for event in shown] == [
        "19 tables dropped: t1, t2, t3, t4, t5, ...",
        "shard 0 is lost",
        "16 tables dropped: t21, t22, t23, t24, t25, ...",
        "table u made",
    ]
    assert [event.number for event in shown] == [19, 20, 36, 37]  # what --since goes on behind
    assert list(folded([drops[0]])) == [drops[0]]


def test_numbers_of_a_table_stand_at_the_right_below_each_other() -> None:
    console = Console(width=40, record=True, file=io.StringIO())
    console.print(table_of(("shard", "rows"), [("a", "1,000"), ("b", "7")], expand=True))
    lines = console.export_text().splitlines()
    assert {len(line) for line in lines} == {40}
    assert lines[3].endswith("1,000 │")
    assert lines[4].endswith("    7 │")


def test_the_last_picture_stays_dimmed_below_why_it_is_old() -> None:
    console = Console(width=80, force_terminal=True, file=(written := io.StringIO()))
    console.print(_stale(Text("shard 0 up"), GeartrainError("no answer")))
    said, before = written.getvalue().splitlines()[0], written.getvalue().splitlines()[-1]
    assert "no answer; asked again" in said
    assert before.startswith("\x1b[2mshard 0 up")
