"""The rules of the house over the syntax tree: small rooms with a name, words with one meaning, seams with a bench.

Who may import what is in ``test_imports.py``.
"""

from __future__ import annotations

import ast
import functools
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDERS = ("ams", "bridge", "workers", "serving", "geartrain")
LARGEST_ROOM = 14
"""Files of a folder beside its ``__init__.py``."""

# Optional mechanism -> who may know it, and the bench that justifies it with the words of its case.
OPTIONAL: dict[str, tuple[tuple[str, ...], str, str]] = {
    "geartrain.ams.storage.snapshot.chain": (
        ("ams/storage/snapshot", "ams/server", "ams/client", "bridge/placements", "serving/live"),
        "snapshot_dirty.py",
        "dirty",
    ),
}

Sources = Mapping[str, str]
"""Source text by path."""


def product_sources() -> dict[str, str]:
    sources = {}
    for folder in FOLDERS:
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            relative = path.relative_to(REPOSITORY)
            is_link = relative.parts[0] == "geartrain" and relative.parts[1] in FOLDERS
            if not is_link and relative.parts[:2] != ("ams", "pb"):
                sources[relative.as_posix()] = path.read_text(encoding="utf-8")
    return sources


def rooms_without_a_sentence(sources: Sources) -> list[str]:
    """Folders whose ``__init__.py`` does not say in one sentence what they are."""
    found = []
    for folder in sorted({path.rpartition("/")[0] for path in sources}):
        text = ast.get_docstring(ast.parse(sources.get(f"{folder}/__init__.py", ""))) or ""
        sentence = text.split("\n\n")[0]
        if not sentence.endswith(".") or ". " in sentence:
            found.append(f"{folder}/__init__.py says {sentence!r}, not what the folder is in one sentence")
    return found


def crowded_rooms(sources: Sources) -> list[str]:
    """Folders with more files than a person reads at a glance."""
    counts: dict[str, int] = defaultdict(int)
    for path in sources:
        folder, _, name = path.rpartition("/")
        counts[folder] += name != "__init__.py"
    return [
        f"{folder} holds {count} files; split it along an idea"
        for folder, count in counts.items()
        if count > LARGEST_ROOM
    ]


def classes_of_one_name(sources: Sources) -> list[str]:
    """Public classes whose name another public class has too."""
    places: dict[str, list[str]] = defaultdict(list)
    for path, source in sources.items():
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path)
    return [f"class {name} is in {', '.join(where)}" for name, where in places.items() if len(where) > 1]


@functools.cache
def imports_of(source: str) -> frozenset[str]:
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update({node.module, *(f"{node.module}.{alias.name}" for alias in node.names)})
    return frozenset(found)


def mechanisms_without_a_reason(sources: Sources, benches: Sources) -> list[str]:
    """Optional mechanisms that are known outside their seam, or whose bench is gone."""
    found = []
    for module, (rooms, bench, case) in OPTIONAL.items():
        own = module.removeprefix("geartrain.").replace(".", "/") + ".py"
        if own not in sources:
            found.append(f"{module} is gone: take it out of OPTIONAL")
        if case not in benches.get(bench, ""):
            found.append(f"no bench shows what {module} is worth: benchmarks/{bench} has no {case!r}")
        for path, source in sources.items():
            if module in imports_of(source) and not path.startswith(rooms):
                found.append(f"{path} knows {module}, which lies behind {rooms}")
    return found


def compiled_sources() -> dict[str, str]:
    """Source text by path below ``ams/kernels/csrc``, the list of its rooms with them."""
    folder = REPOSITORY / "ams/kernels/csrc"
    return {
        path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def compiled_rooms_in_disorder(sources: Sources) -> list[str]:
    """What is wrong with the rooms of the compiled core by the list in its ``README.md``."""
    rooms = re.findall(r"^\| `(\w+)` \| .+\. \|$", sources["README.md"], flags=re.MULTILINE)
    found = []
    for path, source in sources.items():
        room = path.rpartition("/")[0]
        if room and room not in rooms:
            found.append(f"README.md does not say what {room} is")
        elif room != "bindings" and re.search(r"#include <(nanobind/|Python\.h)", source):
            found.append(f"{path} knows Python, which the core does without")
        elif room:
            used = re.findall(r'^#include "(\w+)/', source, flags=re.MULTILINE)
            found += [
                f"{path} includes {item}, which lies above it"
                for item in used
                if item not in rooms[: rooms.index(room) + 1]
            ]
    return found


def bench_sources() -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in (REPOSITORY / "benchmarks").glob("*.py")}


def test_a_folder_says_in_one_sentence_what_it_is() -> None:
    assert rooms_without_a_sentence(product_sources()) == []


def test_no_folder_is_crowded() -> None:
    assert crowded_rooms(product_sources()) == []
    assert crowded_rooms(compiled_sources()) == []


def test_includes_of_the_compiled_core_point_one_way() -> None:
    assert compiled_rooms_in_disorder(compiled_sources()) == []


def test_a_public_class_name_occurs_once() -> None:
    assert classes_of_one_name(product_sources()) == []


def test_an_optional_mechanism_has_one_seam_and_a_bench() -> None:
    assert mechanisms_without_a_reason(product_sources(), bench_sources()) == []


@pytest.mark.parametrize(
    ("check", "planted"),
    [
        (rooms_without_a_sentence, {"ams/new/__init__.py": ""}),
        (rooms_without_a_sentence, {"ams/new/__init__.py": '"""Rooms. And more."""'}),
        (rooms_without_a_sentence, {"ams/new/thing.py": ""}),
        (crowded_rooms, {f"ams/new/part{number}.py": "" for number in range(LARGEST_ROOM + 1)}),
        (compiled_rooms_in_disorder, {"README.md": "| `base` | Words. |", "new/thing.cpp": ""}),
        (compiled_rooms_in_disorder, {"README.md": "| `base` | Words. |", "base/thing.hpp": "#include <Python.h>\n"}),
        (
            compiled_rooms_in_disorder,
            {"README.md": "| `base` | Words. |\n| `rows` | Rows. |", "base/thing.hpp": '#include "rows/row.hpp"\n'},
        ),
        (classes_of_one_name, {"ams/one.py": "class Peer: ...", "bridge/two.py": "class Peer: ..."}),
    ],
)
def test_a_planted_violation_is_found(check: object, planted: Sources) -> None:
    assert callable(check)
    assert check(planted)


def test_a_mechanism_that_leaks_or_loses_its_bench_is_found() -> None:
    sources, benches = product_sources(), bench_sources()
    leak = {**sources, "workers/job/loop.py": "from geartrain.ams.storage.snapshot import chain"}
    assert len(mechanisms_without_a_reason(leak, benches)) == 1
    assert mechanisms_without_a_reason(sources, {**benches, "snapshot_dirty.py": ""})
    gone = {path: source for path, source in sources.items() if path != "ams/storage/snapshot/chain.py"}
    assert mechanisms_without_a_reason(gone, benches)


def test_no_file_of_the_product_is_ignored_by_git() -> None:
    """A wheel leaves out what .gitignore names, also where git itself follows the file."""
    if not (REPOSITORY / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a checkout of git")
    asked = subprocess.run(
        ["git", "check-ignore", "--no-index", "--stdin"],
        cwd=REPOSITORY,
        input="\n".join(product_sources()),
        capture_output=True,
        text=True,
        check=False,
    )
    assert asked.returncode in (0, 1), asked.stderr
    assert asked.stdout == "", "these would be missing in a wheel; anchor the pattern of .gitignore with a slash"
