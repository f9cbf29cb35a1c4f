"""Bars for the tables of benchmarks: a bold figure of a table becomes a bar above it, so that each number stands once.

They are HTML, which a phone can break into lines and a dark page colours.
"""

from __future__ import annotations

import html
import math
import re

TABLE = re.compile(r"^\| Case \| Rival \| Figure \|.*\n\|[-|]+\n((?:\|.*\n?)+)", flags=re.MULTILINE)
BOLD = re.compile(r"\*\*(.+?)\*\*")


def with_charts(markdown: str) -> str:
    """Put a chart before each table that has a bold figure."""
    return TABLE.sub(lambda found: f"{_chart(found[1])}\n\n{found[0]}", markdown)


def _chart(rows: str) -> str:
    cells = [row.strip("| ").split(" | ") for row in rows.splitlines()]
    bold = [(row, found[1].split(" / ")) for row in cells if (found := BOLD.search(row[2]))]
    ratios = [float(ratio) for _, row in bold for ratio in row]
    if not ratios:
        return ""
    first, last = math.floor(math.log2(min(1, *ratios))), math.ceil(math.log2(max(ratios)))
    ticks = "".join(f'<i style="left: {_at(2.0**n, first, last)}">{2.0**n:g}</i>' for n in range(first, last + 1))
    return "\n".join(
        [
            f'<ul class="bars" style="--octave: {100 / (last - first):.3f}%">',
            *(_bars(_plain(row[0]), _plain(row[1]), numbers, first, last) for row, numbers in bold),
            f"<li><div><span></span><div>{ticks}</div></div></li>",
            "</ul>",
        ]
    )


def _bars(case: str, rival: str, ratios: list[str], first: int, last: int) -> str:
    """The bars of a row: "A: x / y" beside "2 / 3" are two kinds of the case; without kinds, "P / Q" are two rivals."""
    what, _, listed = case.rpartition(": ")
    if len(ratios) == 1:
        kinds = [""]
    elif len(kinds := listed.split(" / ")) == len(ratios):
        case = what
    else:
        kinds, rival = [f"against {one}" for one in rival.split(" / ")], ""
    against = f" <small>against {html.escape(rival)}</small>" if rival else ""
    lines = []
    for kind, ratio in zip(kinds, ratios, strict=True):
        left, right = (_at(end, first, last) for end in sorted((1.0, float(ratio))))
        slower = ' class="slower"' if float(ratio) < 1 else ""
        bar = f'<i{slower} style="left: {left}; right: calc(100% - {right})"></i><b style="left: {right}">{ratio}</b>'
        lines.append(f"<div><span>{html.escape(kind)}</span><div>{bar}</div></div>")
    return f"<li><p>{html.escape(case)}{against}</p>{''.join(lines)}</li>"


def _at(ratio: float, first: int, last: int) -> str:
    """Where a ratio is on an axis of octaves: each line is twice the one before."""
    return f"{100 * (math.log2(ratio) - first) / (last - first):.1f}%"


def _plain(text: str) -> str:
    """The words of a cell: no links, no marks of code, no notes."""
    text = re.sub(r" ?\(\[[^]]*\]\([^)]*\)\)| ?[⁰¹²³⁴-⁹]|`", "", text)
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text).strip()
