"""No part of the product imports itself by way of others, not even inside functions or for type checkers alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tests.unit.test_imports import REPOSITORY, product_files


def module_of(path: Path) -> str:
    """The dotted name under which a product file is imported."""
    parts = path.with_suffix("").parts
    parts = parts if parts[0] == "geartrain" else ("geartrain", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules_used(source: str, known: frozenset[str]) -> Iterator[str]:
    """Yield those of the ``known`` modules that the source imports anywhere, also inside functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield from (name for name in (full if full in known else node.module,) if name in known)


def circle(sources: Mapping[str, str]) -> list[str]:
    """Return modules (by name, with their source) of which each imports the next, from one to itself; [] if there are
    none.
    """
    known = frozenset(sources)
    graph = {name: {*modules_used(source, known)} - {name} for name, source in sources.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


def test_no_product_module_imports_itself_by_way_of_others() -> None:
    sources = {module_of(path): (REPOSITORY / path).read_text(encoding="utf-8") for path in product_files()}
    assert len(sources) > 200
    assert circle(sources) == []


def test_a_circle_is_found_also_through_a_function() -> None:
    planted = {
        "geartrain.ams.a": "from geartrain.ams import b",
        "geartrain.ams.b": "def f():\n    from geartrain.ams.c import g\n    return g",
        "geartrain.ams.c": "if TYPE_CHECKING:\n    import geartrain.ams.a",
        "geartrain.ams.d": "from geartrain.ams.a import x",
    }
    found = circle(planted)
    assert set(found) == {"geartrain.ams.a", "geartrain.ams.b", "geartrain.ams.c"}
    assert found[0] == found[-1]
    assert circle(planted | {"geartrain.ams.c": "import json"}) == []
