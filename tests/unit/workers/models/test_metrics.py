import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from geartrain.ams.values.errors import InvalidArgument
from geartrain.workers.models.metrics import area_under_curve

SCORED = st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=2, max_size=30).filter(
    lambda pairs: len({label for _, label in pairs}) == 2
)


@given(SCORED)
def test_it_is_the_part_of_pairs_in_the_right_order(pairs: list[tuple[int, bool]]) -> None:
    positive = [score for score, label in pairs if label]
    negative = [score for score, label in pairs if not label]
    wins = sum((a > b) + 0.5 * (a == b) for a in positive for b in negative)
    found = area_under_curve([score for score, _ in pairs], [label for _, label in pairs])
    assert found == pytest.approx(wins / (len(positive) * len(negative)))


@pytest.mark.parametrize(
    ("scores", "labels", "message"),
    [
        ([1.0, np.nan], [0, 1], "1 of them NaN"),
        ([1.0], [0, 1], "1 scores.*2 labels"),
        ([1.0, 2.0], [1, 1], "2 are positive"),
        ([], [], "0 are positive"),
    ],
)
def test_nonsense_is_refused(scores: list[float], labels: list[int], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        area_under_curve(scores, labels)
