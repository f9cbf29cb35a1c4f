"""MovieLens as samples: what is a click, which ids stand for what, what is held out, and files that cannot be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import geartrain as gt
from geartrain.workers.ctr.samples import movielens
from geartrain.workers.ctr.samples.click_samples import PADDING, split
from geartrain.workers.ctr.samples.movielens import find_movielens, read_movielens
from tests.support.movielens_files import ITEMS, RATINGS, write_movielens


def test_ratings_become_clicks_and_ids(tmp_path: Path) -> None:
    samples = read_movielens(write_movielens(tmp_path))
    fields = samples.fields
    assert len(samples) == RATINGS
    assert set(samples.clicks.tolist()) == {0.0, 1.0}
    np.testing.assert_array_equal(samples.clicks == 1, (fields["user"] + fields["item"]) % 2 == 0)
    np.testing.assert_array_equal(fields["age"], fields["user"] + 20)
    assert set(fields["occupation"].tolist()) == set(gt.hash_strings(["artist", "writer"]).tolist())
    known = fields["item"] < ITEMS
    np.testing.assert_array_equal(fields["year"][known], fields["item"][known] + 1980)
    assert set(fields["year"][~known].tolist()) == {PADDING}
    comedy, war, drama = gt.hash_strings(["Comedy", "War", "Drama"]).tolist()
    assert {tuple(row) for row in fields["genres"].tolist()} == {(comedy, war), (drama, PADDING), (PADDING, PADDING)}


def test_a_split_parts_the_samples_and_by_time_the_latest_are_held_out(tmp_path: Path) -> None:
    samples = read_movielens(write_movielens(tmp_path))
    train, test = split(samples, "time", seed=0)
    assert (len(train), len(test)) == (480, 120)
    assert train.times is not None and test.times is not None
    assert train.times.max() <= test.times.min()
    one, again, other = (split(samples, "random", seed=seed)[1].times.tolist() for seed in (1, 1, 2))
    assert one == again != other
    parts = np.concatenate([part.times for part in split(samples, "random", seed=1)])
    assert sorted(parts) == sorted(samples.times)
    to_choose, by = split(samples, "time", seed=0, validation=True)
    assert to_choose.times is not None and by.times is not None
    assert (len(to_choose), len(by)) == (384, 96)
    np.testing.assert_array_equal(np.concatenate([to_choose.times, by.times]), train.times)
    late = int(np.sort(samples.times)[450])
    assert split(replace(samples, held_out_from=late), "time", seed=0)[1].times.min() == late
    with pytest.raises(gt.errors.ConfigError, match="split is 'user'; it must be one of random, time"):
        split(samples, "user", seed=0)
    with pytest.raises(gt.errors.ConfigError, match="there are 4 samples"):
        split(samples.subset(np.arange(4)), "time", seed=0)


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("ml-100k.inter", "\titem_id:", "\tfilm_id:", "ml-100k.inter has no column 'item_id'"),
        ("ml-100k.inter", "\t880000007", "\tsoon", "ml-100k.inter, line 3: timestamp is 'soon'; it must be an integer"),
        (
            "ml-100k.user",
            "\n3\t23\t",
            "\n-3\t23\t",
            "ml-100k.user, line 5: user_id is '-3'; it must be an integer >= 0",
        ),
        ("ml-100k.user", "\n3\t23\t", "\n33\t23\t", r"ml-100k.inter, line \d+: user_id 3 is not in .*ml-100k.user"),
        ("ml-100k.item", "\tDrama", "", "ml-100k.item, line 3: 3 columns, where the first line has 4"),
    ],
)
def test_a_file_that_cannot_be_is_named_with_line_and_value(
    tmp_path: Path, file: str, old: str, new: str, message: str
) -> None:
    path = write_movielens(tmp_path) / file
    path.write_text(path.read_text(encoding="utf-8").replace(old, new, 1), encoding="utf-8")
    with pytest.raises(gt.errors.ConfigError, match=message):
        read_movielens(tmp_path)


@pytest.mark.parametrize("rating", ["good", "nan"])
def test_a_rating_that_is_no_number_is_named(tmp_path: Path, rating: str) -> None:
    path = write_movielens(tmp_path) / "ml-100k.inter"
    lines = path.read_text(encoding="utf-8").split("\n")
    user, item, _, time = lines[1].split("\t")
    path.write_text("\n".join([lines[0], f"{user}\t{item}\t{rating}\t{time}", *lines[2:]]), encoding="utf-8")
    with pytest.raises(gt.errors.ConfigError, match=f"line 2: rating is '{rating}'; it must be a number"):
        read_movielens(tmp_path)


def test_a_folder_without_the_files_says_which(tmp_path: Path) -> None:
    with pytest.raises(gt.errors.ConfigError, match=r"ml-100k.user is not there; .* ml-100k.inter"):
        read_movielens(tmp_path)


def test_without_a_network_the_cache_is_named_and_left_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_ARGS", f"--no-index --find-links {tmp_path}")
    with pytest.raises(
        gt.errors.ConfigError, match=r"MovieLens-100K is not in .*movielens, and pip could not download"
    ):
        find_movielens(tmp_path / "cache", lambda _: None)
    assert list((tmp_path / "cache" / "movielens").iterdir()) == []


def test_a_file_that_is_not_the_pinned_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_movielens(tmp_path / "movielens")
    monkeypatch.setattr(movielens, "download_packages", None)  # nothing is fetched: all of them are there
    with pytest.raises(gt.errors.ConfigError, match=r"has SHA-256 .* but it is pinned to"):
        find_movielens(tmp_path, lambda _: None)
