"""Only the scheduler makes a bucket map; everyone else receives it, but for plans of clusters to come."""

from __future__ import annotations

import ast

import pytest

from tests.unit.test_imports import REPOSITORY, product_files

MAKER = "even_placement"
HOME, DEFINED_IN = "ams/scheduler/state.py", "ams/values/placement.py"
PLANS = (
    "bridge/head/backends/memory_plan.py"  # a new cluster would take so much, by the map that a scheduler would make
)


def uses(source: str) -> list[ast.AST]:
    """Every place of the source that names the function that makes maps: imports, calls, attributes, strings."""
    return [
        node
        for node in ast.walk(ast.parse(source))
        if (isinstance(node, ast.alias) and node.name == MAKER)
        or (isinstance(node, ast.Name) and node.id == MAKER)
        or (isinstance(node, ast.Attribute) and node.attr == MAKER)
        or (isinstance(node, ast.Constant) and node.value == MAKER)
    ]


def test_the_scheduler_alone_makes_a_bucket_map_and_in_one_place() -> None:
    found = {str(path): uses((REPOSITORY / path).read_text()) for path in product_files()}
    assert [path for path, nodes in found.items() if nodes and path != PLANS] == [HOME]
    assert [type(node) for node in found[HOME]] == [ast.alias, ast.Name], "imported, and called once"
    assert any(
        isinstance(node, ast.FunctionDef) and node.name == MAKER
        for node in ast.walk(ast.parse((REPOSITORY / DEFINED_IN).read_text()))
    ), "this test looks for another name than the code has"


@pytest.mark.parametrize(
    "planted",
    [
        "from geartrain.ams.values.placement import even_placement as place",
        "owned = placement.even_placement(2)",
        "def f(n):\n    return even_placement(n) == 0",
        "getattr(placement, 'even_placement')(2)",
    ],
)
def test_a_map_that_is_made_elsewhere_is_found(planted: str) -> None:
    assert uses(planted)
