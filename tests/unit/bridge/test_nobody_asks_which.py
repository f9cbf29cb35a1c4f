"""A margin, selection, row backend or module with rows answers for itself: no product file asks which one it has."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from geartrain.ams.programs.selection import Selection
from geartrain.bridge.embedding.group import GROUP_ROWS
from geartrain.bridge.head import class_head
from geartrain.bridge.head.backends.registry import ROW_BACKENDS
from geartrain.bridge.head.loss import margins
from geartrain.bridge.head.selection import knn_selection  # noqa: F401 (a selection)

REPOSITORY = Path(__file__).resolve().parents[3]
KINDS = {
    *(kind.__name__ for kind in Selection.__subclasses__()),
    *(
        name
        for module in pkgutil.iter_modules(margins.__path__, f"{margins.__name__}.")
        for name, value in vars(importlib.import_module(module.name)).items()
        if isinstance(value, type) and (hasattr(value, "target") or hasattr(value, "for_batch"))
    ),
    *(backend.__name__ for backend in (*ROW_BACKENDS.values(), *GROUP_ROWS.values())),
    *(
        "DeviceRows",
        "DeviceUpdate",
        "Communicator",
        "SyncRanks",
        "RowUpdate",
        "GearUpdate",
        "CompiledPass",
        "TensorPass",
    ),
    *(class_head.ClassHead.__name__, "SlowGear", "DenseTable"),
}


def questions(source: str) -> Iterator[str]:
    """Names of the kinds that ``isinstance``, ``issubclass``, ``type(x) is`` or ``match`` ask for."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, asked]):
                pass
            case ast.MatchClass(cls=asked):
                pass
            case ast.Compare(left=ast.Call(func=ast.Name(id="type")), comparators=[asked]):
                pass
            case _:
                continue
        named = {getattr(part, "id", getattr(part, "attr", "")) for part in ast.walk(asked)}
        yield from sorted(named & KINDS)


@pytest.mark.parametrize("folder", ["bridge", "workers", "geartrain"])
def test_no_product_file_asks_which_one_it_has(folder: str) -> None:
    found = {
        str(path.relative_to(REPOSITORY)): names
        for path in (REPOSITORY / folder).rglob("*.py")
        if not path.is_symlink() and (names := list(questions(path.read_text(encoding="utf-8"))))
    }
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        "isinstance(select, PartialFC)",
        "isinstance(select, FullSoftmax | knn.KNNSelection)",
        "not isinstance(margin, (ArcFace, CosFace))",
        "type(backend) is RankBackend",
        "match module:\n    case ClassHead():\n        pass",
        "issubclass(kind, HostedBackend)",
    ],
)
def test_the_rule_catches(source: str) -> None:
    assert list(questions(source))
