"""Size is a decision: every file belongs to a capability, and no capability is above its ceiling."""

import runpy
from pathlib import Path

SIZE = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "size.py"))


def test_lines_that_hold_code_are_counted() -> None:
    python = '"""A\ndocstring."""\n\n# a comment\nsaid = """two\nlines"""  # another\n'
    assert SIZE["python_size"](python) == (2, 3)
    cpp = '/* a\ncomment */ int a; // and\n\nchar const* b = "// none";\n' + "int " + "c" * 120 + ";\n"
    assert SIZE["cpp_size"](cpp) == 4


def test_every_capability_is_below_its_ceiling() -> None:
    assert SIZE["main"]() == 0
