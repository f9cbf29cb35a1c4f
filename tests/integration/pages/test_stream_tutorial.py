"""The tutorial from a stream to an answer: events, clicks that come later, a job, and a service that follows it."""

from __future__ import annotations

import json
import re
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration.pages.test_tutorials import Reader
from tests.support.http_service import ask
from tests.support.pages import DEADLINE_SECONDS, await_text, blocks_of

kafka = pytest.importorskip("confluent_kafka", reason="needs pip install 'geartrain[kafka]'")
pytest.importorskip("onnxruntime", reason="needs pip install 'geartrain[onnx]'")
pytestmark = pytest.mark.slow


def test_answers_follow_a_stream_whose_clicks_come_late(tmp_path: Path) -> None:
    mock = kafka.Producer({"test.mock.num.brokers": 1, "log_level": 0})
    (broker,) = mock.list_topics(timeout=20).brokers.values()
    reader = Reader(tmp_path)
    blocks = {
        block.title: replace(
            block,
            code=block.code.replace("localhost:9092", f"{broker.host}:{broker.port}")
            .replace("127.0.0.1:8000", "127.0.0.1:0")
            .replace("python ", f"{sys.executable} "),
        )
        for block in blocks_of("tutorials/stream.md")
    }
    reader.save(blocks["events.py"])
    reader.type(blocks["send"])
    with reader.running(blocks["worker"]) as worker, reader.running(blocks["serve"]) as serve:
        found = await_text(worker, r"AUC ([\d.]+).* on the latest 10,\d+ samples before they were learned from")
        assert float(found[1]) > 0.5
        address = await_text(serve, r"(127\.0\.0\.1:\d+)")[1]
        asked = json.loads(re.search(r"-d '(.*?)'", blocks["ask"].code)[1])

        def answer_after(version: int) -> int:
            end = time.monotonic() + DEADLINE_SECONDS
            while time.monotonic() < end:
                status, said = ask(address, "POST", "/v1/click", asked)
                if status == 200:
                    following = ask(address, "GET", "/v1/models/ctr")[1]["following"]
                    assert following["seconds_behind"] < 30, following
                if status == 200 and said["version"] > version:
                    assert len(said["answers"]) == 2
                    return int(said["version"])
                time.sleep(0.1)
            raise AssertionError(f"no version above {version}: {serve.read_text()}\n{worker.read_text()}")

        version = answer_after(0)
        reader.type(replace(blocks["send"], code=blocks["send"].code.replace("py 0", "py 40000")))
        assert answer_after(version) > version
