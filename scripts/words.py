"""`make words`: docstrings and names that docs/explanation/words.md asks to write another way, by kind."""

from __future__ import annotations

import argparse
import ast
import re
import tomllib
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CODE = ("ams", "bridge", "workers", "serving", "geartrain/cli", "geartrain/launch", "geartrain/ray", "geartrain/watch")
NO_SUBJECT = re.compile(
    r"(Of|What|That|Those|This|Who|Whom|Which|As|See|How|So|It|Them|Its|One|Some|The same|Nothing|Make it|Soon)\b"
)
VAGUE_VERB = re.compile(
    r"_*(take|begin|settle|give|let|look|find|hear|heard|tell|told|ask|say|keep|note|hold|make|do|put|show|call|come"
    r"|go|meet|join|end|leave)(_|$)"
)
FEWEST_LETTERS = 24


def findings() -> dict[str, list[str]]:
    """Places by kind, "path:line name: first line"."""
    found: dict[str, list[str]] = defaultdict(list)
    for folder in CODE:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "pb" in path.parts:
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
                    continue
                name = getattr(node, "name", "")
                where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)} {name}"
                first = (ast.get_docstring(node) or "").split("\n")[0]
                if NO_SUBJECT.match(first):
                    found["no_subject"].append(f"{where}: {first}")
                elif 0 < len(first) < FEWEST_LETTERS and not isinstance(node, ast.Module):
                    found["few_letters"].append(f"{where}: {first}")
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and VAGUE_VERB.match(name):
                    found["vague_verb"].append(where)
    return found


def ceilings() -> dict[str, int]:
    return tomllib.loads((ROOT / "scripts" / "words.toml").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="print each place")
    listed = parser.parse_args().list
    for kind, places in findings().items():
        print(f"{kind}: {len(places)} (at most {ceilings()[kind]})")
        for place in places if listed else []:
            print(f"  {place}")


if __name__ == "__main__":
    main()
