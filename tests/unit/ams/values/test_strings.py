"""Ids of strings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

import geartrain as gt
from geartrain.ams.values.errors import InvalidArgument, InvalidIds

WORDS = ["", "a", "user_17", "Zürich", "東京", "a longer word than sixteen bytes", "x" * 300]
IDS = [
    3244421341483603138,
    7405662395035962911,
    4800675007419099054,
    838883168505079630,
    5087795124118550966,
    3746311224012138962,
    2725157576055993684,
]
"""Of :data:`WORDS` under seed 0. They lie in users' tables: no version may change them."""


def test_ids_are_those_of_every_machine_and_version() -> None:
    ids = gt.hash_strings(WORDS)
    assert ids.dtype == np.int64 and ids.tolist() == IDS
    assert gt.hash_strings(["user_17"], seed=2**64 - 1).tolist() == [5717524128739455389]


def test_any_way_to_hold_them_gives_the_same_ids_in_its_shape() -> None:
    table = [WORDS[:3], WORDS[3:6]]
    expected = np.array([IDS[:3], IDS[3:6]])
    encoded = [[word.encode() for word in line] for line in table]
    ways = [
        table,
        tuple(map(tuple, table)),
        encoded,
        *(np.array(table, kind) for kind in ("U", "O", np.dtypes.StringDType())),
    ]
    for strings in [*ways, np.array(encoded), np.array(encoded, object), np.array(table).T.copy().T]:
        np.testing.assert_array_equal(gt.hash_strings(strings), expected)
    np.testing.assert_array_equal(gt.hash_strings([*WORDS[:3], *encoded[1]]), IDS[:6])  # both kinds in one list
    assert gt.hash_strings([]).shape == (0,) and gt.hash_strings(np.empty((0, 3), "U")).shape == (0, 3)


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]))), st.integers(0, 2**64 - 1), st.integers(1, 63))
def test_an_id_is_the_low_bits_of_xxh3(words: list[str], seed: int, bits: int) -> None:
    expected = [xxhash.xxh3_64_intdigest(word.encode(), seed) % 2**bits for word in words]
    assert gt.hash_strings(words, seed, bits).tolist() == expected


def test_collisions_are_as_many_as_the_formula_says() -> None:
    number, bits = 200_000, 32
    ids = gt.hash_strings([f"item/{item}" for item in range(number)], seed=1, bits=bits)
    expected = number * (number - 1) / 2 ** (bits + 1)
    assert abs(number - len(np.unique(ids)) - expected) < 5 * expected**0.5  # 4.7 pairs are expected


@pytest.mark.parametrize(
    ("strings", "text"),
    [
        (["a", None], r"strings\[1\] is None; it must be a str or bytes"),
        (["a", "b", float("nan")], r"strings\[2\] is nan"),
        (["a", np.float64("nan")], r"strings\[1\] is .*nan"),
        ([b"a", 7], r"strings\[1\] is 7"),
        ([["a", "b"], ["c", None]], r"strings\[1, 1\] is None"),
        ([["a", "b"], ["c"]], r"strings\[0\] is \['a', 'b'\]"),
        (np.array(["a", None], object), r"strings\[1\] is None"),
        (np.ma.array(["a", "b"], mask=[False, True]), r"strings\[1\] is None"),
        (["a", "\ud800"], r"strings\[1\] is no text: surrogates not allowed"),
        ("abc", "strings is 'abc'; give a list"),
        (np.array("abc"), "give a list or an array"),
        (np.arange(3), "of int64; give a list or an array of strings"),
        (7, "strings is 7 of int64"),
    ],
    ids=lambda one: None if isinstance(one, str) else type(one).__name__,
)
def test_what_is_no_string_is_named(strings: Any, text: str) -> None:
    with pytest.raises(InvalidIds, match=text):
        gt.hash_strings(strings)


@pytest.mark.parametrize("wrong", [{"seed": -1}, {"seed": 2**64}, {"bits": 0}, {"bits": 64}, {"bits": 1.5}], ids=str)
def test_a_seed_or_number_of_bits_out_of_range_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=f"{next(iter(wrong))} is"):
        gt.hash_strings(["a"], **wrong)


def test_arrays_of_pyarrow_are_hashed_as_they_are() -> None:
    pa = pytest.importorskip("pyarrow", reason="needs pyarrow")
    for kind in (pa.string(), pa.large_string(), pa.binary()):
        array = pa.array(WORDS, kind)
        for strings in (array, pa.chunked_array([array[:2], array[2:]]), pa.chunked_array([array, array])[7:]):
            assert gt.hash_strings(strings).tolist() == IDS
    encoded = pa.array([*WORDS, *WORDS]).dictionary_encode()
    assert gt.hash_strings(encoded[7:]).tolist() == IDS
    assert gt.hash_strings(pa.chunked_array([encoded[:3], encoded[3:7]])).tolist() == IDS
    assert gt.hash_strings(pa.chunked_array([], pa.string())).shape == (0,)
    with pytest.raises(InvalidIds, match=r"strings\[3\] is None"):
        gt.hash_strings(pa.chunked_array([pa.array(["a", "b"]), pa.array(["c", None])]))
    with pytest.raises(InvalidIds, match="of int64"):
        gt.hash_strings(pa.array([1, 2]))
