"""Numbers in sentences."""

from __future__ import annotations

import math

import pytest

from geartrain.ams.values.text import counted, lasting, printable, quoted, shown_url, sized


def test_one_is_not_a_plural() -> None:
    assert [counted(number, "shard") for number in (0, 1, 2)] == ["0 shards", "1 shard", "2 shards"]
    assert [counted(number, "class", "classes") for number in (1, 40992)] == ["1 class", "40,992 classes"]


def test_a_very_long_name_is_cut_and_its_length_said() -> None:
    assert quoted("classes") == "'classes'"
    assert quoted(7) == "7"
    long = quoted("x" * 100_000)
    assert len(long) < 120
    assert "(100,000 characters)" in long


def test_sizes_and_times_have_units_that_fit() -> None:
    sizes = {0: "0 bytes", 1023: "1023 bytes", 1536: "1.5 KiB", 3 << 29: "1.5 GiB", 3 << 60: "3,145,728.0 TiB"}
    assert {size: sized(size) for size in sizes} == sizes
    times = {0.4: "0 s", 99.4: "99 s", 100.0: "2 min", 5_500: "92 min", 11_100: "3 h 5 min", 187_200: "2 days 4 h"}
    assert {seconds: lasting(seconds) for seconds in times} == times
    assert [lasting(seconds) for seconds in (math.inf, math.nan)] == ["inf s", "nan s"]


def test_what_a_terminal_would_obey_is_written_out() -> None:
    assert printable("a\x1b[2Jb\x9bc\u202ed\r") == r"a\x1b[2Jb\x9bc\u202ed\r"
    assert printable("Größe 3 µs\n") == "Größe 3 µs\n"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://redis:6379/0", "redis://redis:6379/0"),
        ("redis://user:secret@redis:6379/0", "redis://redis:6379/0"),
        ("redis://:se%23cret@[::1]:6379/0", "redis://[::1]:6379/0"),
        ("redis://redis:6379/0?password=secret", "redis://redis:6379/0"),
        ("unix://user:secret@/run/redis.sock?db=0&password=secret", "unix:///run/redis.sock"),
        ("s3://bucket/a b/ü", "s3://bucket/a b/ü"),
        *((f"redis://:sec{item}ret@redis:6379/0", "redis://...") for item in "@/?# ü\x1b"),
        *((f"redis://1{item}2secret@redis/0", "redis://...") for item in "/?#"),
        ("redis://redis/0#secret", "redis://..."),
        ("redis:secret@redis/0", "..."),
        ("lmbd:store", "lmbd:store"),
    ],
)
def test_of_a_url_only_what_can_be_no_password_is_shown(url: str, shown: str) -> None:
    assert shown_url(url) == shown
