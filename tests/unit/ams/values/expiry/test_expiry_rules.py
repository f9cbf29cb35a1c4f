"""Rules by which rows go: what may be written, what each says, and that nothing else runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.ams.rpc.codec.specs import expiry_from_pb, expiry_to_pb
from geartrain.ams.values.errors import ConfigError, InvalidArgument
from geartrain.ams.values.expiry.rules import (
    Expiry,
    RowBlock,
    Rule,
    SmallerThan,
    Unseen,
    expiry_from_json,
    expiry_rule,
    import_rules,
)


def block(**columns: Any) -> RowBlock:
    num = len(next(iter(columns.values())))
    rows = np.zeros((num, 1), np.float32)
    rows[:, 0] = columns.pop("norm", np.zeros(num))
    known = {name: np.asarray(columns.get(name, np.zeros(num)), np.float64) for name in NAMES[:3]}
    return RowBlock(ids=np.arange(num), read=lambda: rows, **known)


NAMES = ("unseen_steps", "unseen_seconds", "count", "norm")
NUMBER = st.one_of(st.integers(0, 9).map(str), st.sampled_from(NAMES))
ARITHMETIC = st.recursive(
    NUMBER,
    lambda part: st.tuples(part, st.sampled_from("+-*"), part).map(lambda one: f"({one[0]} {one[1]} {one[2]})"),
    max_leaves=4,
)
COMPARISON = st.tuples(ARITHMETIC, st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), ARITHMETIC).map(" ".join)
RULE = st.recursive(
    COMPARISON,
    lambda part: st.one_of(
        st.tuples(part, st.sampled_from(["and", "or"]), part).map(lambda one: f"({one[0]} {one[1]} {one[2]})"),
        part.map(lambda one: f"not ({one})"),
    ),
    max_leaves=4,
)


@settings(deadline=None, max_examples=150)
@given(rule=RULE, seed=st.integers(0, 2**16))
def test_an_expression_says_what_it_says_in_python(rule: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    columns = {name: random.integers(0, 6, 7).astype(np.float64) for name in NAMES}
    found = Rule(rule).expired(block(**dict(columns)))
    expected = [eval(rule, {}, {name: columns[name][i] for name in NAMES}) for i in range(7)]
    assert found.tolist() == expected


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        ("count", "is a number; compare it"),
        ("count < x", "has 'x': allowed are numbers, unseen_steps, unseen_seconds, count, norm"),
        ("__import__('os').system('true') == 0", r"""has "__import__\('os'\).system\('true'\)": allowed are"""),
        ("row.min < 3", "has 'row.min': allowed are"),
        ("(count < 3) + 1 > 2", "has 'count < 3': a number is needed there"),
        ("count and norm < 1", "has 'count': compare it with something there, as in 'count < 3'"),
        ("count ** 2 > 3", r"has 'count \*\* 2': allowed are"),
        ("count in (1, 2)", "has 'count in .*': allowed are"),
        ("[c for c in (1,)] == 1", "allowed are"),
        ("count <", "does not parse"),
        ("count < True", "has 'True'"),
        ("count < 1e999", "has '1e999'"),
        ("count < " + "(" * 60 + "3" + ")" * 60 + "+" * 60 + "1", "nested deeper than 50"),
        ("count < 3 and " * 200 + "count < 3", "has 2809 characters"),
        ("", "does not parse"),
        ("nowhere.at_all:rule", None),
    ],
)
def test_what_is_not_allowed_is_named(rule: str, why: str | None) -> None:
    if why is None:
        with pytest.raises(InvalidArgument, match=r"nowhere.at_all:rule is not known here"):
            Rule(rule).require_usable()
        return
    with pytest.raises(InvalidArgument, match=why):
        Rule(rule)


def test_the_rules_that_have_names() -> None:
    rows = block(unseen_steps=[0, 5, 6], unseen_seconds=[9.0, 10.0, 10.5], norm=[0.05, 0.1, 2])
    assert Unseen(steps=5).expired(rows).tolist() == [False, False, True]
    assert Unseen(seconds=10).expired(rows).tolist() == [False, False, True]
    assert SmallerThan(0.1).expired(rows).tolist() == [True, False, False]
    assert Rule("unseen_steps / 0 > 1").expired(rows).tolist() == [False, True, True]
    for wrong in (lambda: Unseen(), lambda: Unseen(steps=1, seconds=1), lambda: Unseen(steps=-1)):
        with pytest.raises(InvalidArgument, match="Unseen"):
            wrong()
    for numbers in ({"l2": 0}, {"l2": float("nan")}, {"l2": 1, "every": 0}):
        with pytest.raises(InvalidArgument, match=r"l2|every"):
            SmallerThan(**numbers)
    with pytest.raises(InvalidArgument, match="rule is 3"):
        Rule(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "expiry", [Unseen(steps=5), Unseen(seconds=2.5, every=7), SmallerThan(0.1), Rule("count < 3", every=2)]
)
def test_a_rule_is_the_same_at_the_other_end(expiry: Expiry) -> None:
    assert expiry_from_json(expiry.to_json()) == expiry
    assert expiry_from_pb(expiry_to_pb(expiry)) == expiry
    with pytest.raises(InvalidArgument, match="its kind must be one of Unseen, SmallerThan, Rule"):
        expiry_from_json({"kind": "Other"})
    with pytest.raises(InvalidArgument, match="unexpected"):
        expiry_from_json({"kind": "Unseen", "often": 3})


@expiry_rule
def odd_ids(rows: RowBlock) -> Any:
    """A rule of a user's own."""
    return rows.ids % 2 == 1


@expiry_rule
def wrong_shape(rows: RowBlock) -> Any:
    """Another, that is wrong."""
    return rows.ids > 0 if len(rows.ids) > 3 else [True]


def test_a_function_that_is_marked_is_called_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Rule(f"{__name__}:odd_ids").expired(block(count=[1, 1, 1])).tolist() == [False, True, False]
    with pytest.raises(InvalidArgument, match="gave list for 2 rows; it must give a numpy array of one bool"):
        Rule(f"{__name__}:wrong_shape").expired(block(count=[1, 1]))
    for other in ("os:abort", f"{__name__}:NAMES", f"{__name__}:block"):
        with pytest.raises(
            InvalidArgument, match=r"not known here \(known: .*odd_ids.*with @gt.expiry_rule, and start"
        ):
            Rule(other).require_usable()
    (tmp_path / "answers_all.py").write_text(
        "def __getattr__(name):\n    return __getattr__\n\n\nis_geartrain_expiry_rule = 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InvalidArgument, match="not known here"):
        Rule("answers_all:anything").require_usable()
    assert "answers_all" not in sys.modules
    with pytest.raises(ConfigError, match=r"rule_modules names 'answers_all', which defines no rule here"):
        import_rules(["answers_all"])
    for wrong in (len, type("Rules", (), {"__call__": odd_ids})(), lambda rows: rows.ids > 0):
        with pytest.raises(InvalidArgument, match="must be a function at the top of a module"):
            expiry_rule(wrong)


def test_a_rule_that_does_not_say_which_rows_go_cannot_be_made() -> None:
    class Forgetful(Expiry):
        pass

    with pytest.raises(TypeError, match=r"Forgetful.*expired"):
        Forgetful()  # type: ignore[abstract]
