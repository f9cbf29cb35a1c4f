"""What a service counts: by version, added up over its processes, and no more of it than versions are asked."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import numpy as np

from geartrain.ams.observe.metrics import Buckets, Metric
from geartrain.serving.answers import Question
from geartrain.serving.batching import Batcher
from geartrain.serving.catalog import Catalog
from geartrain.serving.metrics import RequestTarget, ServingCounts, describe_process
from geartrain.serving.service import ModelService
from tests.support.toy_servables import ToyServable

ASKED = RequestTarget("toy", "1", "largest")


def families(metrics: Iterable[Metric]) -> dict[str, dict[tuple[str, ...], Any]]:
    return {metric.name: {tuple(map(str, values)): value for values, value in metric.samples} for metric in metrics}


def test_requests_and_batches_are_counted_by_whom_they_were_for() -> None:
    catalog, counts = Catalog(), ServingCounts()
    catalog.add("toy", ToyServable(1))
    batcher = Batcher(threads=0, on_batch=counts.batch)
    service = ModelService(catalog, batcher, counts)
    numbers = np.ones((3, 4), np.float32)
    with catalog.lease("toy") as lease:
        answers = [batcher.submit(lease, "largest", Question(arrays={"numbers": numbers}, parameters=(("k", 1),)))]
        answers += [batcher.submit(lease, "largest", Question(arrays={"numbers": numbers}, parameters=(("k", 1),)))]
        assert families(service.metrics())["serve_queue_items"] == {("0",): 6}
        assert batcher.answer_next()
        assert all(answer.done() for answer in answers)
        counts.request(ASKED, "http", "200", 0.003)
        counts.request(RequestTarget(), "grpc", "NOT_FOUND", 0.0001)
        found = families(service.metrics())
    assert found["serve_requests_total"] == {
        ("0", *ASKED, "http", "200"): 1,
        ("0", "", "", "", "grpc", "NOT_FOUND"): 1,
    }
    assert found["serve_items_total"] == {("0", *ASKED): 6}
    seconds: Buckets = found["serve_request_seconds"][("0", *ASKED, "http")]
    assert seconds.total == 0.003 and [*seconds.counts] == [0, 0, 0, 1, *[0] * 11]
    batches: Buckets = found["serve_batch_items"][("0", *ASKED)]
    assert batches.total == 6 and batches.counts[3] == 1  # one batch of 5 to 8 items
    assert found["serve_requests_under_way"] == {("0", "toy", "1"): 1}
    assert found["serve_ready"] == {(): 1} and found["serve_version"] == {("toy",): 1}
    assert found["serve_version_created_timestamp_seconds"] == {("toy",): 1e9}


def test_processes_are_told_apart_after_json_and_one_that_died_is_left_out() -> None:
    catalog = Catalog()
    catalog.add("toy", ToyServable(1))
    catalog.add("toy", ToyServable(2), share=0.25)
    told: list[dict[str, Any]] = [{"error": "InternalError", "message": "a worker died meanwhile"}]
    for times in (1, 2):
        counts = ServingCounts()
        for _ in range(times):
            counts.request(ASKED, "http", "200", 0.25)
        told.append({"said": json.loads(json.dumps(describe_process(counts, 2, catalog)))})
    service = ModelService(Catalog(), Batcher(threads=0))
    service.everywhere = lambda _: told
    found = families(service.metrics())
    assert found["serve_requests_total"] == {("1", *ASKED, "http", "200"): 1, ("2", *ASKED, "http", "200"): 2}
    assert found["serve_request_seconds"][("2", *ASKED, "http")].total == 0.5
    assert found["serve_queue_items"] == {("1",): 2, ("2",): 2}
    assert found["serve_canary_share"] == {("toy",): 0.25} and found["serve_ready"] == {(): 1}
    assert found["serve_version"] == {("toy",): 1}


def test_counts_of_versions_that_nobody_asks_any_more_go() -> None:
    counts = ServingCounts()
    for version in range(100):
        counts.request(RequestTarget("toy", str(version), "largest"), "http", "200", 0.1)
        counts.request(RequestTarget("other", "1", "largest"), "http", "200", 0.1)
    versions = {values[1] for name, values, _ in counts.read() if name == "serve_requests_total" and values[0] == "toy"}
    assert versions == {str(version) for version in range(92, 100)}
    assert any(values[0] == "other" and numbers[-1] == 100 for _, values, numbers in counts.read())


def test_a_service_without_models_is_not_ready() -> None:
    assert families(ModelService(Catalog(), Batcher(threads=0)).metrics())["serve_ready"] == {(): 0}
