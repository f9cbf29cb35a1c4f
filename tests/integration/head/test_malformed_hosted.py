"""What a hosted model is sent: encoded and decoded alike, and refused by name where it does not fit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.factory import connect
from geartrain.ams.pb.v1 import shard_pb2
from geartrain.ams.rpc.codec import framing, hosted
from geartrain.ams.rpc.services import SHARD
from geartrain.ams.values.config import ClientConfig
from geartrain.ams.values.errors import (
    GeartrainError,
    InvalidArgument,
    InvalidIds,
    InvalidRows,
    NonFinite,
    ProtocolError,
)
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.shard_messages import Computed, ComputeHosted, HostedInputs, UpdateHosted
from geartrain.ams.values.specs import Constant
from geartrain.bridge.head.class_head import ClassHead
from geartrain.bridge.head.loss.margins.angular import CosFace
from geartrain.bridge.rows.optimizer import RowOptimizer
from geartrain.launch.hosting import local
from tests.integration.conftest import ServedCluster

NUM_ROWS, DIM = 6000, 4
NAMES = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=10)
ASK, TELL = SHARD[ComputeHosted].header, SHARD[UpdateHosted].header
ARRAYS = st.dictionaries(
    NAMES,
    st_numpy.arrays(
        st.sampled_from([np.float32, np.float64, np.int64]),
        st_numpy.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=5),
    ),
    max_size=4,
)
INPUTS = st.builds(
    HostedInputs,
    arrays=ARRAYS,
    settings=st.dictionaries(NAMES, st.floats(allow_nan=False), max_size=3),
    seed=st.integers(0, 2**64 - 1),
    step=st.integers(0, 2**64 - 1),
    weight=st.floats(allow_nan=False),
)


def require_equal(found: Any, wanted: Any) -> None:
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert found[name].dtype == wanted[name].dtype
        np.testing.assert_array_equal(found[name], wanted[name])


@settings(max_examples=60, deadline=None)
@given(inputs=st.lists(INPUTS, max_size=3), part_bytes=st.integers(1, 200))
def test_requests_and_replies_survive_their_encoding(inputs: list[HostedInputs], part_bytes: int) -> None:
    compute = ComputeHosted(table="t", model="m", operation="o", inputs=tuple(inputs))
    update = UpdateHosted(table="t", model="m", inputs=tuple(inputs), lr=0.5, scale=2.0)
    asked = [
        framing.decode_framed(part, shard_pb2.ComputeHostedRequest)
        for part in hosted.in_parts(ASK.to_message(compute), compute.inputs, part_bytes)  # type: ignore[arg-type]
    ]
    pieces = [
        framing.decode_framed(part, shard_pb2.UpdateHostedRequest)
        for part in hosted.in_parts(TELL.to_message(update), update.inputs, part_bytes)  # type: ignore[arg-type]
    ]
    assert len(asked) == len(pieces) and len({header.context.stream for header, _ in asked}) == 1
    data = b"".join(bytes(raw.get(15) or b"") for _, raw in pieces)
    assert data == b"".join(bytes(raw.get(15) or b"") for _, raw in asked)
    for codec, header, sent in ((ASK, asked[-1][0], compute), (TELL, pieces[-1][0], update)):
        decoded = codec.from_message(header, inputs=hosted.decode_inputs(header.inputs, memoryview(data)))
        assert replace(decoded, inputs=()) == replace(sent, inputs=())  # type: ignore[type-var]
        for mine, its in zip(decoded.inputs, sent.inputs, strict=True):
            assert replace(mine, arrays={}) == replace(its, arrays={})
            require_equal(mine.arrays, its.arrays)
    for item in inputs:
        computed = hosted.decode_computed(hosted.encode_computed(Computed(arrays=item.arrays)))
        assert isinstance(computed, Computed)
        require_equal(computed.arrays, item.arrays)


@settings(max_examples=150, deadline=None)
@given(
    shape=st.tuples(st.integers(0, 2**64 - 1), st.none() | st.integers(0, 2**64 - 1)),
    kind=st.integers(0, 4),
    data=st.binary(max_size=64),
)
def test_no_header_makes_the_decoder_take_more_than_came(shape: tuple[int, int | None], kind: int, data: bytes) -> None:
    header = shard_pb2.HostedArray(name="a", rows=shape[0], columns=shape[1])
    header.type = kind  # type: ignore[assignment]
    inputs = [shard_pb2.HostedInputs(arrays=[header])]
    with contextlib.suppress(ProtocolError, InvalidArgument):
        (decoded,) = hosted.decode_inputs(inputs, memoryview(data))
        assert decoded.arrays["a"].nbytes <= len(data)


@pytest.mark.parametrize(
    ("arrays", "error", "message"),
    [
        ([], ProtocolError, "take 0 bytes, the message has 16"),
        ([("a", 1, 2), ("a", 1, 2)], InvalidArgument, "'a'"),
        ([("", 1, 4)], InvalidArgument, "1 … 64"),
        ([("a", 0, 4)], InvalidArgument, "type code 0"),
        ([("a", 3, 3)], ProtocolError, "needs 24 bytes, 16 are left"),
        ([(str(i), 1, 0) for i in range(65)], InvalidArgument, "at most 64"),
    ],
)
def test_a_header_that_does_not_fit_its_bytes_is_refused(
    arrays: list[tuple[str, int, int]], error: type[Exception], message: str
) -> None:
    headers = [shard_pb2.HostedArray(name=name, type=kind, rows=rows) for name, kind, rows in arrays]  # type: ignore[arg-type]
    with pytest.raises(error, match=message):
        hosted.decode_inputs([shard_pb2.HostedInputs(arrays=headers)], memoryview(bytes(16)))


def test_no_length_that_numpy_cannot_count_is_taken_for_an_empty_array() -> None:
    header = shard_pb2.HostedArray(name="a", type=shard_pb2.ARRAY_TYPE_FLOAT64, rows=0, columns=2**60)
    with pytest.raises(InvalidArgument, match="no length takes 2"):
        hosted.decode_inputs([shard_pb2.HostedInputs(arrays=[header])], None)


def good() -> dict[str, Any]:
    return {
        "features": np.eye(2, DIM, dtype=np.float32),
        "labels": np.array([3, 4097]),
        "lse2": np.ones(2, np.float32),
        "target_weight": -np.ones(2, np.float32),
    }


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in good().items() if key != name}


BAD: list[tuple[dict[str, Any], dict[str, float], type[GeartrainError], str]] = [
    (without("features"), {}, InvalidRows, "features is missing"),
    ({**good(), "features": np.eye(2, DIM)}, {}, InvalidRows, "features is float64"),
    ({**good(), "features": np.eye(2, 5, dtype=np.float32)}, {}, InvalidRows, r"\[2, 5\]"),
    ({**good(), "features": np.empty((0, DIM), np.float32)}, {}, InvalidRows, "no batch that is empty"),
    ({**good(), "labels": np.array([3])}, {}, InvalidRows, "labels is int64"),
    ({**good(), "labels": np.array([3, NUM_ROWS])}, {}, InvalidIds, r"labels\[1\] is 6000"),
    ({**good(), "labels": np.array([-1, 3])}, {}, InvalidIds, r"labels\[0\] is -1"),
    ({**good(), "active": np.array([4, 3])}, {}, InvalidIds, "active"),
    ({**good(), "retired_runs": np.array([7, 5])}, {}, InvalidArgument, "retired classes"),
    ({**good(), "retired_runs": np.array([5, 7, 9])}, {}, InvalidRows, "retired_runs has 3 values"),
    ({**good(), "retired_runs": np.array([0, NUM_ROWS])}, {}, InvalidArgument, "retired"),
    ({**good(), "retired_runs": np.array([0, NUM_ROWS - 1])}, {}, InvalidIds, "label"),
    ({**good(), "batch_labels": np.array([NUM_ROWS])}, {"sample_rate": 0.1}, InvalidIds, "batch_labels"),
    (good(), {"sample_rate": 7.0}, InvalidArgument, "sample_rate is 7.0"),
    (good(), {"sample_rate": np.nan}, InvalidArgument, "sample_rate is nan"),
    (good(), {"logit_factor": -1.0}, InvalidArgument, "logit_factor"),
    (good(), {"logit_factor": np.inf}, InvalidArgument, "logit_factor"),
]
BAD_UPDATES: list[tuple[dict[str, Any], dict[str, float], type[GeartrainError], str]] = [
    (without("lse2"), {}, InvalidRows, "lse2 is missing"),
    ({**good(), "lse2": np.array([np.nan, 1], np.float32)}, {}, NonFinite, "lse2"),
    ({**good(), "target_weight": np.array([np.inf, 1], np.float32)}, {}, NonFinite, "target_weight"),
    ({**good(), "features": np.full((2, DIM), np.nan, np.float32)}, {}, NonFinite, "features"),
    ({**good(), "lse2": np.full(2, -1e30, np.float32)}, {}, NonFinite, "NaN or infinity"),
]


@pytest.fixture(scope="module")
def cluster_of_two() -> Iterator[Cluster]:
    """One cluster for all cases: none of them may change it."""
    served = ServedCluster(2)
    try:
        with connect(served.address) as connected:
            yield connected
    finally:
        served.stop()


@pytest.mark.parametrize(
    ("case", "is_update"), [(item, False) for item in BAD] + [(update, True) for update in BAD + BAD_UPDATES]
)
def test_inputs_that_do_not_fit_change_nothing(cluster_of_two: Cluster, case: Any, is_update: bool) -> None:
    arrays, settings_, error, message = case
    table = cluster_of_two.create_table(
        "t", dim=DIM, optimizer=SGD(1.0), num_rows=NUM_ROWS, initializer=Constant(1), reuse=True
    )
    before = table.pull(np.arange(NUM_ROWS))
    calls = table.hosted("class_head")
    inputs = (HostedInputs(arrays=arrays, settings={"logit_factor": 8.0, "normalised": 1.0, **settings_}),)
    with pytest.raises(error, match=message):
        if is_update:
            write = calls.prepare_update(lambda _: inputs)
            try:
                write.send()
            finally:
                write.abandon()
        else:
            calls.compute("forward", lambda _: inputs)
    np.testing.assert_array_equal(table.pull(np.arange(NUM_ROWS)), before)


def test_operations_and_tables_that_are_not_there_are_named(cluster_of_two: Cluster) -> None:
    table = cluster_of_two.create_table("hashed", dim=DIM, optimizer=SGD(1.0), reuse=True)
    inputs = (HostedInputs(arrays=good(), settings={"logit_factor": 8.0}),)
    with pytest.raises(InvalidArgument, match="no operation 'backward'"):
        table.hosted("class_head").compute("backward", lambda _: inputs)
    with pytest.raises(InvalidArgument, match="one batch; it was given 2"):
        table.hosted("class_head").compute("forward", lambda _: inputs * 2)
    with pytest.raises(InvalidArgument, match="hashed"):
        table.hosted("class_head").compute("forward", lambda _: inputs)
    with pytest.raises(InvalidArgument, match="no model 'mlp'; it hosts 'class_head'"):
        table.hosted("mlp").compute("forward", lambda _: inputs)


def test_the_norm_of_more_than_a_message_holds_is_that_of_one_shard_in_this_process() -> None:
    norms = []
    for rows in ("served", "embedded"):
        with contextlib.ExitStack() as stack:
            if rows == "served":
                served = ServedCluster(2)
                stack.callback(served.stop)
                config = ClientConfig(part_bytes=64 << 10, max_message_bytes=2 << 20)
                cluster = stack.enter_context(connect(served.address, config=config))
            else:
                cluster = stack.enter_context(local())
            head = ClassHead(cluster, "t", num_classes=50, dim=128, margin=CosFace(8), rows="hosted")
            optimizer = RowOptimizer(head)
            for seed in range(2):
                generator = torch.Generator().manual_seed(seed)
                features = torch.randn(3000, 128, generator=generator)  # 3 MB in two batches
                head(features, torch.randint(50, (3000,), generator=generator)).backward()
            norms.append(float(optimizer.clip_grad_norm_(1.0)))
            optimizer.step()
            assert head.step == 1
    assert norms[0] == pytest.approx(norms[1], rel=1e-5) and norms[0] > 0
