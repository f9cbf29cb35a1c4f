"""Nobody asks which optimizer it is but the room of the optimizers: each answers for itself."""

from __future__ import annotations

import ast

import pytest

from geartrain.ams.values.optimizers.registry import OPTIMIZERS
from tests.unit.test_imports import REPOSITORY, product_files

ROOMS = ("ams/values/optimizers/", "bridge/kernels/optimizers.py", "bridge/kernels/triton/row_")
KINDS = {kind.__name__ for kind in OPTIMIZERS.values()}


def questions(source: str) -> list[str]:
    """Return where the source asks for the class of an optimizer, or compares a name with that of one."""
    found = []
    for node in ast.walk(ast.parse(source)):
        asked: list[ast.expr] = []
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass"):
            asked = node.args[1:]
        elif isinstance(node, ast.MatchClass):
            asked = [node.cls]
        elif isinstance(node, ast.Compare):
            asked = [node.left, *node.comparators]
        parts = [part for item in asked for part in ast.walk(item)]
        kinds = {getattr(part, "id", getattr(part, "attr", "")) for part in parts}
        texts = {part.value for part in parts if isinstance(part, ast.Constant)}
        if kinds & KINDS or texts & OPTIMIZERS.keys():
            found.append(f"line {getattr(node, 'lineno', 0)}: {ast.unparse(node)}")
    return found


def test_no_product_file_asks_which_optimizer_it_is() -> None:
    files = [path for path in product_files() if not path.as_posix().startswith(ROOMS)]
    assert len(files) > 500
    assert [(path, asked) for path in files if (asked := questions((REPOSITORY / path).read_text("utf-8")))] == []


@pytest.mark.parametrize(
    "source",
    [
        "isinstance(spec.optimizer, Adam)",
        "isinstance(spec.optimizer, SGD | Momentum)",
        "isinstance(optimizer, (gt.SGD, gt.Adagrad))",
        "type(optimizer) is SparseMomentum",
        "optimizer.name == 'adam'",
        "match optimizer:\n    case Adam(lr=lr): pass",
    ],
)
def test_the_rule_catches(source: str) -> None:
    assert questions(source)


@pytest.mark.parametrize(
    "source", ["isinstance(optimizer, RowOptimizerSpec)", "optimizer.counts_updates", "table.optimizer = Adam()"]
)
def test_the_rule_allows(source: str) -> None:
    assert not questions(source)
