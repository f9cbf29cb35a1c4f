"""Pairs in InsightFace's .bin files, and what a model makes of them."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from geartrain.ams.values.errors import InvalidArgument, NonFinite
from geartrain.workers.data.bitmaps import Preprocessing
from geartrain.workers.data.pairs import read_pairs, read_plain_pickle
from geartrain.workers.models.trained_model import save_model
from geartrain.workers.models.verify import FALSE_ACCEPT_RATES, true_accept_rates, verify
from tests.support.command_line import invoke
from tests.support.face_files import encoded, glyph
from tests.support.picture_models import picture_model

PLAIN = st.recursive(
    st.binary(max_size=300) | st.integers(-(2**40), 2**40) | st.booleans(),
    lambda inner: st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple),
    max_leaves=12,
)


def pairs(count: int = 20) -> tuple[list[bytes], list[bool]]:
    """Pairs of glyphs: the same one twice, or two that differ."""
    images, same = [], []
    for pair in range(count):
        first, second = ("AB"[pair % 2], "AB"[pair % 2] if pair % 3 else "BA"[pair % 2])
        images += [encoded(glyph(first, pair), "JPEG"), encoded(glyph(second, pair + 1), "JPEG")]
        same.append(first == second)
    return images, same


def python2_pickle(images: list[bytes], same: list[bool]) -> bytes:
    """Protocol 2 as Python 2 writes it: str is BINSTRING."""
    strings = b"".join(b"T" + struct.pack("<i", len(image)) + image + b"q\x01" for image in images)
    flags = b"".join(b"\x88" if flag else b"\x89" for flag in same)
    return b"\x80\x02]q\x00(" + strings + b"e]q\x02(" + flags + b"e\x86q\x03."


@given(value=PLAIN, protocol=st.sampled_from([3, 4, 5]))
def test_plain_values_are_read_as_pickle_would(value: Any, protocol: int, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "value.bin"
    path.write_bytes(pickle.dumps(value, protocol))
    assert read_plain_pickle(path) == value


@pytest.mark.parametrize("written", ["python 2", 3, 4, 5])
def test_pairs_of_both_pythons_are_read(written: Any, tmp_path: Path) -> None:
    images, same = pairs()
    path = tmp_path / "glyphs.bin"
    path.write_bytes(python2_pickle(images, same) if written == "python 2" else pickle.dumps((images, same), written))
    found = read_pairs(path)
    assert found.images == images
    assert found.same.tolist() == same
    assert found.picture(3).size == (48, 48)


class Attack:
    """Runs a command when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_that_would_run_something_is_refused_and_runs_nothing(protocol: int, tmp_path: Path) -> None:
    path, marker = tmp_path / "evil.bin", tmp_path / "was here"
    path.write_bytes(pickle.dumps(([Attack(marker)], [True]), protocol))
    with pytest.raises(InvalidArgument, match=r"evil\.bin, offset \d+: pickle opcode \w+ is not allowed"):
        read_pairs(path)
    assert not marker.exists()


def test_a_pickle_cut_anywhere_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "cut.bin"
    images, same = [b"a" * 10, b"b" * 60], [True]
    for whole in (pickle.dumps((images, same), 4), python2_pickle(images, same)):
        for size in range(len(whole)):
            path.write_bytes(whole[:size])
            with pytest.raises(InvalidArgument, match=r"cut\.bin"):
                read_pairs(path)


@given(flips=st.lists(st.tuples(st.integers(0, 10_000), st.integers(1, 255)), min_size=1, max_size=4))
def test_a_damaged_pickle_is_read_or_refused_but_never_crashes(
    flips: list[tuple[int, int]], tmp_path_factory: Any
) -> None:
    data = bytearray(pickle.dumps(([b"a" * 9, b"bc"] * 3, [True, False, True]), 4))
    for place, bits in flips:
        data[place % len(data)] ^= bits
    path = tmp_path_factory.getbasetemp() / "flipped.bin"
    path.write_bytes(data)
    try:
        read_pairs(path)
    except InvalidArgument as error:
        assert "flipped.bin" in str(error)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([b"a"], "holds no pairs"),
        (([b"a", 3], [True]), "picture 1 is int"),
        (([b"a", b"b"], [7]), "must hold bools"),
        (([b"a"], [True]), "1 pictures for 1 pairs"),
        (([], []), "0 pictures"),
    ],
)
def test_what_is_no_list_of_pairs_is_refused(value: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "odd.bin").write_bytes(pickle.dumps(value, 4))
    with pytest.raises(InvalidArgument, match=rf"odd\.bin.*{message}"):
        read_pairs(tmp_path / "odd.bin")


def reference_accuracy(distances: np.ndarray, same: np.ndarray) -> float:
    """InsightFace's calculate_roc, in plain loops: contiguous folds, the first best threshold of 400."""
    share, rest = divmod(len(same), 10)  # scikit-learn's KFold: the first folds have one more
    bounds = [fold * share + min(fold, rest) for fold in range(11)]
    accuracies = []
    for low, high in itertools.pairwise(bounds):
        train = [i for i in range(len(same)) if not low <= i < high]
        scores = [sum((distances[i] < t) == same[i] for i in train) for t in np.arange(0, 4, 0.01)]
        best = np.arange(0, 4, 0.01)[int(np.argmax(scores))]
        accuracies.append(np.mean([(distances[i] < best) == same[i] for i in range(low, high)]))
    return float(np.mean(accuracies))


@pytest.mark.parametrize("count", [60, 61, 69])
def test_accuracy_is_that_of_the_published_protocol(count: int) -> None:
    dice = np.random.default_rng(0)
    same = dice.random(count) < 0.5
    distances = np.clip(np.where(same, 0.9, 1.4) + dice.normal(0, 0.3, count), 0, 4)
    result = verify(distances, same)
    assert result.accuracy == pytest.approx(reference_accuracy(distances, same))
    assert 0.6 < result.accuracy < 0.95
    assert 0.9 < result.threshold < 1.4


@given(
    st.lists(st.tuples(st.integers(0, 12), st.booleans()), min_size=12, max_size=200),
    st.sampled_from([0.0, 1e-12]),
)
def test_true_accepts_are_the_most_at_any_threshold_within_the_rate(drawn: list[tuple[int, bool]], low: float) -> None:
    distances = np.array([low + number / 8 for number, _ in drawn])  # with ties
    same = np.array([flag for _, flag in drawn])
    different = int((~same).sum())
    rates = true_accept_rates(distances, same) if same.any() else {}
    for rate, found in rates.items():
        allowed = [t for t in [*distances, 9.0] if (distances[~same] < t).sum() <= round(rate * different, 9)]
        assert found == max(float((distances[same] < t).mean()) for t in allowed)
    assert set(rates) == {rate for rate in FALSE_ACCEPT_RATES if round(rate * different, 9) >= 1 and same.any()}


def test_features_that_are_not_finite_are_no_measure() -> None:
    same = np.arange(20) % 2 == 0
    distances = np.where(same, 0.5, 1.5)
    distances[3] = np.nan
    with pytest.raises(NonFinite, match="distance of pair 3 is nan; 1 of 20 are not finite"):
        verify(distances, same)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    look = Preprocessing(kind="photo", size=32, channels=3)
    save_model(tmp_path / "model", picture_model(torch.eye(2, 16), ["A", "B"], look))
    return tmp_path / "model"


def test_verify_prints_accuracy_and_true_accepts(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "glyphs.bin"
    path.write_bytes(pickle.dumps(pairs(40), 4))
    assert "accuracy 0." in (text := invoke("verify", str(model), str(path)).stdout) and "TAR@FAR=0.1" in text
    (told,) = json.loads(invoke("verify", str(model), str(path), "--json").stdout)
    assert told["pairs"] == 40
    assert told["mirror"] is True
    assert 0.5 < told["accuracy"] <= 1


def test_verify_names_the_picture_that_is_none(model: Path, tmp_path: Path) -> None:
    images, same = pairs()
    images[7] = b"torn"
    (tmp_path / "bad.bin").write_bytes(pickle.dumps((images, same), 4))
    with pytest.raises(InvalidArgument, match=r"bad\.bin, picture 7"):
        invoke("verify", str(model), str(tmp_path / "bad.bin"))
    (tmp_path / "few.bin").write_bytes(pickle.dumps((images[:6], same[:3]), 4))
    with pytest.raises(InvalidArgument, match=r"few\.bin: .*10 pairs at least"):
        invoke("verify", str(model), str(tmp_path / "few.bin"))
    with pytest.raises(InvalidArgument, match="not a file"):
        invoke("verify", str(model), str(tmp_path / "none.bin"))
