"""Traces of a job, from its step to the shards' part of a snapshot, by processes that print their spans."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from geartrain.ams.observe import traces
from geartrain.ams.values.errors import ConfigError
from tests.integration.commands.test_up import up
from tests.support.movielens_files import write_movielens


def spans_of(text: str) -> list[dict[str, Any]]:
    """Those among the lines of a log."""
    found, decoder, at = [], json.JSONDecoder(), 0
    while (at := text.find("{\n", at)) >= 0:
        span, at = decoder.raw_decode(text, at)
        found.append(span)
    return found


def test_a_step_and_a_snapshot_are_traces_that_go_on_in_the_roles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("opentelemetry.instrumentation.grpc", reason="needs the extra [traces]")
    monkeypatch.setenv(traces.VARIABLE, "console")
    films = write_movielens(tmp_path / "films")
    with up("--shards=1") as running:
        settings = ["--steps=3", "--set=batch_size=50", "--set=dim=4", "--logger=none"]
        where = ["--data", str(films), "--out", str(tmp_path / "run"), "--scheduler", str(running.facts["scheduler"])]
        command = [sys.executable, "-m", "geartrain", "worker", "ctr", *where, *settings]
        done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=170, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        spans = spans_of(done.stderr)
        steps = {span["context"]["trace_id"]: span for span in spans if span["name"] == "geartrain step"}
        assert [span["attributes"]["geartrain.step"] for span in steps.values()] == [0, 1, 2]
        of_rows = [span for span in spans if span["name"].startswith(("geartrain pull", "geartrain write"))]
        below = {span["context"]["trace_id"] for span in of_rows if span["parent_id"] is not None}
        assert below >= set(steps), [span["name"] for span in spans]
        (snapshot,) = [span for span in spans if span["name"] == "geartrain snapshot"]
        wanted = f'"trace_id": "{snapshot["context"]["trace_id"]}"'
        running.process.terminate()
        said = running.process.communicate(timeout=60)[1]
        assert wanted in said and "/Freeze" in said, said[-3000:]


def test_a_worker_that_is_stopped_sends_its_last_spans(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.instrumentation.grpc", reason="needs the extra [traces]")
    films = write_movielens(tmp_path / "films")
    settings = ["--steps=100000", "--set=batch_size=50", "--set=dim=4", "--logger=none"]
    where = ["--data", str(films), "--out", str(tmp_path / "run")]
    command = [sys.executable, "-m", "geartrain", "worker", "ctr", *where, *settings]
    environ = {**os.environ, traces.VARIABLE: "console", "OTEL_BSP_SCHEDULE_DELAY": "600000"}
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert any(line.startswith("step 10/") for line in process.stdout)
            process.terminate()
            errors = process.communicate(timeout=60)[1]
        finally:
            process.kill()
    assert process.returncode == 3, errors[-3000:]
    assert [span for span in spans_of(errors) if span["name"] == "geartrain snapshot"]


def test_traces_that_cannot_be_are_refused_and_off_they_are_nothing() -> None:
    with pytest.raises(ConfigError, match="OTEL_TRACES_EXPORTER is 'zipkin'; use otlp, console or none"):
        traces.start("worker", {traces.VARIABLE: "zipkin"})
    calls = object()
    assert traces.traced(calls) is calls
    assert traces.span("step", step=1) is traces.span("snapshot")
