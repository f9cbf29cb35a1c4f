"""Numbers in sentences."""

from __future__ import annotations

from geartrain.ams.values.text import counted, quoted


def test_one_is_not_a_plural() -> None:
    assert [counted(number, "shard") for number in (0, 1, 2)] == ["0 shards", "1 shard", "2 shards"]
    assert [counted(number, "class", "classes") for number in (1, 40992)] == ["1 class", "40,992 classes"]


def test_a_very_long_name_is_cut_and_its_length_said() -> None:
    assert quoted("classes") == "'classes'"
    assert quoted(7) == "7"
    long = quoted("x" * 100_000)
    assert len(long) < 120
    assert "(100,000 characters)" in long
