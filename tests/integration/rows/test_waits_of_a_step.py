"""Writes that are sent together wait for a dead shard together: once, however many tables they are to."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import pytest
import torch

import geartrain as gt
from geartrain.ams.values.config import ClientConfig
from geartrain.ams.values.errors import ShardUnavailable
from tests.integration.conftest import ServedCluster

TABLES = 6
IDS = np.arange(64)
ONES = np.ones((64, 4), np.float32)


def test_the_tables_of_a_step_share_one_wait(
    served: Callable[..., ServedCluster], caplog: pytest.LogCaptureFixture
) -> None:
    cluster = served(2)
    config = ClientConfig(attempt_timeout_seconds=5.0, recovery_timeout_seconds=0.5)
    with gt.connect(cluster.address, config=config) as client:
        tables = [client.create_table(f"t{n}", dim=4, optimizer=gt.SGD(0.1)) for n in range(TABLES)]
        writes = [table.prepare_push(IDS, ONES) for table in tables]
        cluster.servers[1].stop(0)
        with caplog.at_level(logging.WARNING), pytest.raises(ShardUnavailable, match=r"within 0\.5 s"):
            writes[0].send_with(writes[1:])
        assert caplog.text.count("does not answer, waiting for it up to 0.5 s") == 1, caplog.text
        assert not any(write.is_sent for write in writes)
        for write in writes:
            write.abandon()


@pytest.mark.timeout(60)
def test_a_step_of_more_tables_than_writes_may_be_in_flight_does_not_wait_for_itself() -> None:
    fields = [gt.Field(f"f{n}", dim=1) for n in range(3)]
    with gt.local(config=ClientConfig(max_in_flight_writes=2)) as client:
        groups = [gt.EmbeddingGroup(client, name, fields, optimizer=gt.SGD(1.0)) for name in ("wide", "deep")]
        rows = gt.RowOptimizer(*groups)
        batch = {field.name: torch.arange(4) for field in fields}
        for _ in range(2):
            sum(vectors.sum() for group in groups for vectors in group(batch).values()).backward()  # type: ignore[union-attr]
            rows.step()
            rows.zero_grad()
        assert {group.table(field.name).version() for group in groups for field in fields} == {2}


def test_the_state_of_many_tables_waits_for_a_dead_shard_once(
    served: Callable[..., ServedCluster], caplog: pytest.LogCaptureFixture
) -> None:
    cluster = served(2)
    config = ClientConfig(attempt_timeout_seconds=5.0, recovery_timeout_seconds=0.5)
    with gt.connect(cluster.address, config=config) as client:
        fields = [gt.Field(f"f{n}", dim=4) for n in range(TABLES)]
        group = gt.EmbeddingGroup(client, "model", fields, optimizer=gt.SGD(0.1))
        whole = group.state_dict()
        assert len(str(whole)) > 1000 and "row_digests" in str(whole)
        cluster.servers[1].stop(0)
        with caplog.at_level(logging.WARNING):
            rest = group.state_dict()
        assert caplog.text.count("does not answer, waiting for it up to 0.5 s") == 1, caplog.text
        assert rest.keys() == whole.keys() and "row_digests" not in str(rest)


def test_a_dead_shard_is_named_once_however_many_calls_meet_it(
    served: Callable[..., ServedCluster], caplog: pytest.LogCaptureFixture
) -> None:
    cluster = served(2)
    config = ClientConfig(attempt_timeout_seconds=5.0, recovery_timeout_seconds=0.3)
    with gt.connect(cluster.address, config=config) as client:
        tables = [client.create_table(f"t{n}", dim=4, optimizer=gt.SGD(0.1)) for n in range(TABLES)]
        cluster.servers[1].stop(0)
        with caplog.at_level(logging.WARNING):
            for table in tables:
                with pytest.raises(ShardUnavailable):
                    table.pull(IDS)
        assert caplog.text.count("does not answer, waiting for it") == 1, caplog.text
