"""`make size`: code lines and Python tokens by capability, beside the ceilings in scripts/size.toml.

A code line holds code: no blank, comment, docstring or generated file. Python counts as ruff formats it; a line of
C++ beyond 120 columns counts twice. A file belongs to the capability with the longest matching path.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CEILINGS = ROOT / "scripts" / "size.toml"
CPP = (".cpp", ".hpp")
CPP_COLUMNS = 120
GENERATED = re.compile(r"_pb2(_grpc)?\.pyi?$|_core\.pyi$")
LAYOUT = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}
# Comments, which go, and strings, which stay: what looks like a comment in a string is none.
CPP_COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|("(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\')', re.DOTALL)


def python_size(source: str) -> tuple[int, int]:
    """Code lines and tokens of one Python file."""
    lines: set[int] = set()
    tokens = 0
    begins = True  # a statement: one that begins with a string is a docstring
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in LAYOUT:
            begins = begins or token.type not in (tokenize.COMMENT, tokenize.NL)
            continue
        if not (begins and token.type == tokenize.STRING):
            tokens += 1
            lines.update(range(token.start[0], token.end[0] + 1))
        begins = False
    return len(lines), tokens


def cpp_size(source: str) -> int:
    """Code lines of one C++ file; one beyond 120 columns counts twice."""
    code = CPP_COMMENT.sub(lambda found: found[1] or "\n" * found[0].count("\n"), source)
    return sum(1 + (len(line.rstrip()) > CPP_COLUMNS) for line in code.splitlines() if line.strip())


def measured(files: list[str]) -> dict[str, tuple[int, int]]:
    """Code lines and tokens of each of `files` (paths from the root of the repository) that holds code of ours."""
    sizes = {}
    for name in files:
        if GENERATED.search(name) or not name.endswith((".py", *CPP)):
            continue
        source = (ROOT / name).read_text()
        sizes[name] = python_size(source) if name.endswith(".py") else (cpp_size(source), 0)
    return sizes


def by_capability(sizes: dict[str, tuple[int, int]]) -> tuple[Counter[tuple[str, str]], Counter[tuple[str, str]]]:
    """Lines and tokens of every (group, capability). ValueError for a file that belongs to none."""
    owners = {
        path: (group, capability)
        for group, capabilities in tomllib.loads(CEILINGS.read_text()).items()
        for capability, entry in capabilities.items()
        for path in entry["paths"]
    }
    lines: Counter[tuple[str, str]] = Counter()
    tokens: Counter[tuple[str, str]] = Counter()
    for name, (its_lines, its_tokens) in sizes.items():
        owner = max((path for path in owners if name.startswith(path)), key=len, default=None)
        if owner is None:
            raise ValueError(f"{name} belongs to no capability of {CEILINGS.name}: name its folder there")
        lines[owners[owner]] += its_lines
        tokens[owners[owner]] += its_tokens
    return lines, tokens


def tracked_files() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]


def main() -> int:
    lines, tokens = by_capability(measured(tracked_files()))
    above = 0
    print(f"{'':40}{'lines':>8}{'ceiling':>9}{'tokens':>9}")
    for group, capabilities in tomllib.loads(CEILINGS.read_text()).items():
        keys = [(group, capability) for capability in capabilities]
        ceiling = sum(entry["ceiling"] for entry in capabilities.values())
        print(f"{group:40}{sum(lines[key] for key in keys):8,}{ceiling:9,}{sum(tokens[key] for key in keys):9,}")
        for key in keys:
            limit = capabilities[key[1]]["ceiling"]
            too_large = lines[key] > limit
            above += too_large
            print(f"  {key[1]:38}{lines[key]:8,}{limit:9,}{tokens[key]:9,}{'  above its ceiling' if too_large else ''}")
    if above:
        print(f"{above} above: delete, or raise the ceiling in scripts/size.toml with the reason in the commit.")
    return int(above > 0)


if __name__ == "__main__":
    sys.exit(main())
