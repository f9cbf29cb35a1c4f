"""Frames: the compiled reader and writer against ones written from the page, and a million damaged ones."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.ams.kernels import _core
from geartrain.ams.values.errors import ProtocolError
from tests.support import frame_codec
from tests.support.frame_calls import PLAIN
from tests.support.frame_codec import ITEM_BYTES, Described

PAGE = Path(__file__).resolve().parents[4] / "docs" / "explanation" / "frames.md"
INT64 = st.integers(-(2**63), 2**63 - 1)
NAMES = st.text(max_size=40)
FLOATS = st.floats(allow_nan=False)


@st.composite
def operations(draw: st.DrawFn, kinds: tuple[str, ...] = ("pull", "push", "assign")) -> Described:
    kind = draw(st.sampled_from(kinds))
    dim, dtype, num_ids = draw(st.integers(1, 40)), draw(st.integers(0, 2)), draw(st.integers(0, 20))
    one: Described = {"kind": kind, "dim": dim, "dtype": dtype, "table": draw(NAMES), "stream": draw(NAMES)}
    one |= {name: draw(INT64) for name in ("table_incarnation", "incarnation", "sequence", "oldest_unacknowledged")}
    one["ids"] = draw(st.binary(min_size=8 * num_ids, max_size=8 * num_ids))
    group = {name: draw(INT64) for name in ("world_size", "rank", "sequence", "sample_count")} | {"job": draw(NAMES)}
    if kind == "pull":
        one["with_present"] = draw(st.booleans())
        one |= {"required_sync": group} if draw(st.booleans()) else {}
        return one
    one["rows"] = struct.pack("<Q", draw(st.integers(0, 2**64 - 1))) * (num_ids * dim * ITEM_BYTES[dtype])
    one["rows"] = one["rows"][: num_ids * dim * ITEM_BYTES[dtype]]
    if kind == "push":
        one |= {"scale": draw(FLOATS), "step_goes_on": draw(st.booleans())}
        one["scalars"] = draw(st.lists(st.tuples(NAMES, FLOATS), max_size=3))
        one |= {"lr": draw(FLOATS)} if draw(st.booleans()) else {}
        one |= {"group": group} if draw(st.booleans()) else {}
        one |= {name: draw(INT64) for name in ("step", "pulled_at") if draw(st.booleans())}
        one |= {"unix_seconds": draw(FLOATS)} if draw(st.booleans()) else {}
        one |= (
            {"occurrences": draw(st.binary(min_size=4 * num_ids, max_size=4 * num_ids))} if draw(st.booleans()) else {}
        )
    return one


@st.composite
def requests(draw: st.DrawFn) -> tuple[int, float, list[Described]]:
    fence = {"shard_incarnation": draw(INT64), "cluster_version": draw(INT64)}
    described = [{**item, **fence} for item in draw(st.lists(operations(), min_size=1, max_size=4))]
    return draw(st.integers(0, 2**64 - 1)), draw(st.floats(0, 1e6)), described


@settings(deadline=None)
@given(requests())
def test_a_request_is_written_and_read_as_the_page_says(request: tuple[int, float, list[Described]]) -> None:
    by_the_page = frame_codec.request(*request)
    assert _core.build_request_frame(*request) == by_the_page
    assert _core.parse_request_frame(by_the_page) == request
    assert frame_codec.parsed_request(by_the_page) == request


@st.composite
def results(draw: st.DrawFn) -> Described:
    if draw(st.booleans()):
        wait = draw(st.floats(0, 100))
        return {"error": draw(st.text("abcü", min_size=1)), "message": draw(NAMES), "retry_after_seconds": wait}
    size = draw(st.integers(0, 100))
    one: Described = {"rows": bytes(range(size)), "created": draw(INT64), "duplicate": draw(st.booleans())}
    one["writes"] = draw(INT64)
    return {**one, "present": b"\1" * (size // 4)} if size >= 4 and draw(st.booleans()) else one


def sizes_of(described: list[Described]) -> list[tuple[int, int]]:
    return [(len(item.get("rows", b"")), len(item.get("present", b""))) for item in described]


@settings(deadline=None)
@given(st.integers(0, 2**64 - 1), st.lists(results(), min_size=1, max_size=4))
def test_a_reply_is_written_and_read_as_the_page_says(number: int, described: list[Described]) -> None:
    frame = _core.build_reply_frame(number, described)
    assert frame_codec.parsed_reply(frame, number, [rows for rows, _ in sizes_of(described)]) == described
    assert _core.parse_reply_frame(frame, number, sizes_of(described)) == described
    by_the_page = frame_codec.reply(number, described)
    assert _core.parse_reply_frame(by_the_page, number, sizes_of(described)) == described


ONE: Described = {
    **PLAIN,
    "kind": "pull",
    "table": "t",
    "dim": 4,
    "ids": struct.pack("<2q", 7, 9),
    "with_present": False,
}


def test_the_example_of_the_page_is_a_frame() -> None:
    dump = re.findall(r"^[0-9a-f]{4}((?: {1,2}[0-9a-f]{2}){16})", PAGE.read_text("utf-8"), re.MULTILINE)
    assert bytes.fromhex("".join(dump)) == _core.build_request_frame(5, 1.5, [ONE])


def of_two() -> bytes:
    push: Described = {**ONE, "kind": "push", "scale": 0.5, "step_goes_on": True, "lr": 0.1, "rows": bytes(16 * 32)}
    push |= {"table": "rows of a table", "stream": "job/0", "ids": struct.pack("<16q", *range(16)), "dim": 8}
    push |= {"scalars": [("momentum", 0.9), ("weight_decay", 1e-4)]}
    push["group"] = {"job": "job", "world_size": 4, "rank": 1, "sequence": 17, "sample_count": 32}
    push |= {"step": 3, "unix_seconds": 1.7e9, "pulled_at": 40, "occurrences": struct.pack("<16I", *range(1, 17))}
    return bytes(_core.build_request_frame(5, 1.5, [{**ONE, "with_present": True}, push]))


@pytest.mark.parametrize("seed", range(4))
def test_no_damaged_frame_is_taken_or_read_beyond_its_end(seed: int) -> None:
    """A million frames: every one of them lies before a page that ends the process when it is touched."""
    assert frame_codec.parsed_request(of_two())
    refused, taken, undamaged = _core.read_damaged_frames(of_two(), False, 5, 2, seed, 200_000)
    assert (refused + undamaged, taken) == (200_000, 0)
    assert undamaged < 100
    reply = _core.build_reply_frame(5, [{"created": 3}, {"error": "NonFinite", "message": "row 3 holds NaN"}])
    refused, taken, undamaged = _core.read_damaged_frames(reply, True, 5, 2, seed, 50_000)
    assert (refused + undamaged, taken) == (50_000, 0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({0: b"HTTP"}, "this is not a frame"),
        ({4: b"\2\0"}, "has version 2, this process version 1"),
        ({16: b"\6"}, "the header's checksum is wrong"),
        ({64: b"\3"}, "an operation's checksum is wrong"),
    ],
)
def test_a_damaged_header_is_named(change: dict[int, bytes], words: str) -> None:
    frame = bytearray(_core.build_request_frame(5, 1.5, [ONE]))
    for at, data in change.items():
        frame[at : at + len(data)] = data
    with pytest.raises(ProtocolError, match=words):
        _core.parse_request_frame(bytes(frame))


def named(**change: Any) -> bytes:
    return frame_codec.request(5, 1.5, [{**ONE, **change}])


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (named(dim=0), "rows have no columns"),
        (named(kind="assign", with_present=True, rows=bytes(32)), "a flag that its kind does not have"),
        (named(ids=b"", dim=2**32 - 1, kind="assign", rows=b"", lr=1.0), "a flag that its kind does not have"),
        (named(scalars=[("a", 1.0)]), "an operation other than a push has scalars"),
        (named(kind="assign", rows=bytes(32), step=3), "a flag that its kind does not have"),
        (named(kind="push", rows=bytes(32), occurrences=b""), "occurrences are more"),
        (named(kind="assign", rows=bytes(65)), "bytes follow"),
        (named(kind="assign", rows=b""), "rows are more"),
        (frame_codec.header(1, 0, 5, 0), "holds no operation"),
        (frame_codec.header(1, 2000, 5, 0), "or too many"),
        (frame_codec.header(3, 0, 0, 0), "of another kind"),
    ],
)
def test_what_the_page_does_not_allow_is_refused(frame: bytes, words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        _core.parse_request_frame(frame)


def test_a_name_that_is_not_utf8_is_refused() -> None:
    for name in (b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe2\x82"):
        frame = bytearray(named(table="x" * len(name)))
        frame[192 : 192 + len(name)] = name
        frame[184:192] = struct.pack("<Q", frame_codec.checksum(5, bytes(frame[64:184] + frame[192:200])))
        with pytest.raises(ProtocolError, match="not UTF-8"):
            _core.parse_request_frame(bytes(frame))


def test_a_text_that_does_not_fit_the_reply_is_cut_between_characters() -> None:
    refusals = [{"error": "NonFinite", "message": "ü" * 600, "retry_after_seconds": 0.0}] * 2
    replies = _core.parse_reply_frame(_core.build_reply_frame(5, refusals, 64 + 128 + 201), 5, [(0, 0)] * 2)
    assert [reply["error"] for reply in replies] == ["NonFinite"] * 2
    assert [reply["message"] for reply in replies] == ["ü" * 45, "ü" * 46]
    (alone,) = _core.parse_reply_frame(_core.build_reply_frame(5, refusals[:1], 128), 5, [(0, 0)])
    assert (alone["error"], alone["message"]) == ("", "")


def test_other_rows_than_were_asked_for_are_refused() -> None:
    frame = _core.build_reply_frame(5, [{"rows": bytes(64)}])
    for expected in ((32, 0), (128, 0), (60, 4)):
        with pytest.raises(ProtocolError, match="other rows than were requested"):
            _core.parse_reply_frame(frame, 5, [expected])
    for number, count in ((6, 1), (5, 2)):
        with pytest.raises(ProtocolError, match="it answers another"):
            _core.parse_reply_frame(frame, number, [(64, 0)] * count)


@pytest.mark.parametrize("change", [{"table": "x" * 65536}, {"dim": 0}, {"dim": 2**32}])
def test_what_no_frame_can_hold_is_not_written(change: Described) -> None:
    with pytest.raises(ProtocolError):
        _core.build_request_frame(5, 1.5, [{**ONE, **change}])
    with pytest.raises(ProtocolError):
        _core.build_request_frame(5, 1.5, [])
