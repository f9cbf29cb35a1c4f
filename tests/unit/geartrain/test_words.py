"""Numbers and names in sentences."""

from geartrain.ams.words import quoted


def test_a_very_long_name_is_cut_and_its_length_said() -> None:
    assert quoted("classes") == "'classes'"
    assert quoted(7) == "7"
    long = quoted("x" * 100_000)
    assert len(long) < 120
    assert "(100,000 characters)" in long
