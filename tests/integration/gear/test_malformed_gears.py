"""What no client of ours sends to a slow gear, or gets from it: refused by name, and nothing has changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from geartrain.ams.pb.v1 import gear_pb2
from geartrain.ams.rpc.client.gear import GrpcGearCarrier
from geartrain.ams.rpc.codec import gear as codec
from geartrain.ams.rpc.services import GEAR
from geartrain.ams.values.errors import GeartrainError, InvalidRows, ProtocolError
from geartrain.ams.values.gear_messages import Failure, FeatureReply, Freshness
from tests.integration.gear.gear_cluster import gear_cluster

METHODS = ("Features", "PushFeatureGradients", "FlushGradients", "DescribeGear", "HandOver")
ZERO, NAN = bytes(8), np.full(4, np.nan, "<f4").tobytes()


@pytest.fixture(scope="module")
def calls() -> Iterator[dict[str, Any]]:
    with gear_cluster() as gears:
        _, address = gears.start_gear(gradients_per_id=2)
        with grpc.insecure_channel(address) as channel:
            yield {name: channel.unary_unary(f"/{GEAR.name}/{name}") for name in METHODS}


def refusal(call: Any, data: bytes) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call(data, timeout=10)
    return caught.value.code(), dict(caught.value.trailing_metadata()).get("geartrain-error", "")


@pytest.mark.parametrize("garbage", [b"\xff" * 40, b"\x0a\xff\xff\xff\xff\x7f"])
@pytest.mark.parametrize("method", METHODS)
def test_garbage_is_no_message(calls: dict[str, Any], method: str, garbage: bytes) -> None:
    assert refusal(calls[method], garbage) == (grpc.StatusCode.INVALID_ARGUMENT, "ProtocolError")


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        ({"ids": ZERO, "name": "sound"}, "InvalidArgument"),
        ({"ids": b"1234567"}, "ProtocolError"),
        ({"ids": b"\xff" * 8}, "InvalidIds"),
        ({"ids": ZERO * 2}, "InvalidIds"),
        ({"ids": ZERO, "max_age_seconds": float("nan")}, "InvalidArgument"),
        ({"ids": ZERO, "max_age_seconds": -1.0}, "InvalidArgument"),
    ],
)
def test_a_wrong_request_for_features_is_named(calls: dict[str, Any], request_: dict[str, Any], error: str) -> None:
    request = gear_pb2.FeaturesRequest(**({"name": "image"} | request_))
    assert refusal(calls["Features"], request.SerializeToString())[1] == error


PUSH: dict[str, Any] = {
    "name": "image",
    "source": "fast",
    "incarnation": 1,
    "sequence": 1,
    "keys": ZERO * 2,
    "gradients": bytes(16),
}


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"name": "sound"}, "InvalidArgument"),
        ({"source": ""}, "InvalidArgument"),
        ({"source": "x" * 400}, "InvalidArgument"),
        ({"incarnation": 0}, "InvalidArgument"),
        ({"incarnation": 2**64 - 1}, "InvalidArgument"),
        ({"sequence": 0}, "InvalidArgument"),
        ({"sequence": 2**64 - 1}, "InvalidArgument"),
        ({"lr": float("nan")}, "InvalidArgument"),
        ({"lr": -0.1}, "InvalidArgument"),
        ({"keys": ZERO * 3}, "ProtocolError"),
        ({"keys": b""}, "InvalidRows"),
        ({"keys": b"\xff" * 8 + ZERO}, "InvalidIds"),
        ({"keys": ZERO + b"\xff" * 8}, "InvalidArgument"),
        ({"keys": ZERO * 4, "gradients": bytes(32)}, "InvalidIds"),
        ({"gradients": bytes(15)}, "InvalidRows"),
        ({"gradients": bytes(32)}, "InvalidRows"),
        ({"gradients": NAN}, "NonFinite"),
        ({"sent_to": "127.0.0.1:1#7"}, "NotHolder"),
    ],
)
def test_a_wrong_delivery_is_named_and_changes_nothing(
    calls: dict[str, Any], change: dict[str, Any], error: str
) -> None:
    request = gear_pb2.PushFeatureGradientsRequest(**(PUSH | change))
    assert refusal(calls["PushFeatureGradients"], request.SerializeToString())[1] == error
    described = calls["DescribeGear"](gear_pb2.DescribeGearRequest().SerializeToString(), timeout=10)
    state = gear_pb2.DescribeGearReply.FromString(described)
    assert state.account.received == 0 and state.dense_version == 1


@pytest.mark.parametrize(
    "request_",
    [
        {"name": "sound", "process": "127.0.0.1:1#7"},
        {"name": "image"},
    ],
)
def test_a_wrong_hand_over_is_named(calls: dict[str, Any], request_: dict[str, Any]) -> None:
    request = gear_pb2.HandOverRequest(**request_)
    assert refusal(calls["HandOver"], request.SerializeToString())[1] == "InvalidArgument"


REPLY = FeatureReply(
    vectors_KD=np.arange(8, dtype=np.float32).reshape(2, 4),
    versions=np.array([3, 4]),
    times=np.array([1.5, 2.5]),
    failures={9: Failure("SampleNotFound", "id 9 has no sample")},
    dense_version=5,
)


def test_features_come_as_they_were_sent() -> None:
    data = codec.encode_features(REPLY)
    reply = codec.decode_features(data)
    assert reply.failures == REPLY.failures and reply.dense_version == 5
    for name in ("vectors_KD", "versions", "times"):
        np.testing.assert_array_equal(getattr(reply, name), getattr(REPLY, name))


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"\xff" * 40, ProtocolError),
        (codec.encode_features(REPLY)[:-1], ProtocolError),
        (gear_pb2.FeaturesReply(stamps=bytes(24), vectors=bytes(32)).SerializeToString(), ProtocolError),
        (gear_pb2.FeaturesReply(stamps=bytes(16), vectors=bytes(32)).SerializeToString(), InvalidRows),
        (gear_pb2.FeaturesReply(stamps=bytes(32), vectors=bytes(16)).SerializeToString(), InvalidRows),
        (gear_pb2.FeaturesReply(stamps=bytes(32)).SerializeToString(), InvalidRows),
    ],
)
def test_features_that_come_damaged_or_cut_are_none(
    data: bytes, error: type[GeartrainError], monkeypatch: pytest.MonkeyPatch
) -> None:
    carrier = GrpcGearCarrier("127.0.0.1:1")
    monkeypatch.setattr(carrier, "start_bytes", lambda *_: lambda: data)
    try:
        with pytest.raises(error):
            carrier.features("image", np.arange(2), 4, Freshness(), 1.0)()
    finally:
        carrier.close()


def test_any_lag_will_do_that_fits_the_wire(calls: dict[str, Any]) -> None:
    request = gear_pb2.FeaturesRequest(name="image", ids=ZERO, max_version_lag=2**64 - 1)
    reply = gear_pb2.FeaturesReply.FromString(calls["Features"](request.SerializeToString(), timeout=10))
    assert len(reply.vectors) == 16
