"""Draws docs/assets/way-of-a-call.svg: what a pull of 100 rows passes on one machine, before and with the data plane.

The figures are those of docs/explanation/way-of-a-row.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).resolve().parents[1] / "docs" / "assets" / "way-of-a-call.svg"
WIDTH, ROW, TOP, GAP = 960, 128, 44, 10
TITLE = "A pull of 100 rows on one machine: two interpreters and gRPC before the data plane, one interpreter with it"
STYLE = """
  svg { --ink: #24292f; --soft: #57606a; --line: #8c959f; --a: #ddf4ff; --ae: #0969da; --b: #dafbe1; --be: #1a7f37; --c: #fff1e5; --ce: #bc4c00 }
  @media (prefers-color-scheme: dark) { svg { --ink: #e6edf3; --soft: #9da7b3; --line: #768390; --a: #0c2d6b; --ae: #58a6ff; --b: #0f3d1f; --be: #3fb950; --c: #5a2d0c; --ce: #f0883e } }
  text { font: 13px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: var(--ink) }
  .t { font-weight: 600 } .s { font-size: 11.5px; fill: var(--soft) } .m { text-anchor: middle }
  .python { fill: var(--c); stroke: var(--ce) } .native { fill: var(--b); stroke: var(--be) } .system { fill: var(--a); stroke: var(--ae) }
  .l { fill: none; stroke: var(--line); stroke-width: 1.6 } .al { fill: var(--line) } .box { fill: none; stroke: var(--line); stroke-dasharray: 4 3 }
"""  # noqa: E501
KINDS = {"python": "Python, interpreter lock", "system": "gRPC and the system", "native": "C++, no interpreter"}


@dataclass(frozen=True)
class Stop:
    """What a call passes, in the order of its way there."""

    kind: str
    name: str
    lines: tuple[str, ...]
    width: int


WAYS: dict[str, tuple[tuple[Stop, ...], str]] = {
    "before": (
        (
            Stop("python", "client", ("Table.pull", "unique, route", "encode a message"), 150),
            Stop("system", "gRPC", ("its threads", "its copies"), 110),
            Stop("system", "loopback", ("TCP, two copies", "two wake-ups"), 120),
            Stop("system", "gRPC", ("its threads", "its copies"), 110),
            Stop("python", "shard: a thread of gRPC", ("decode a message", "join the queue"), 160),
            Stop("python", "shard: the writer", ("marks, lease, tables", "gather the rows"), 160),
        ),
        "rows are copied six times on their way back",
    ),
    "with the data plane": (
        (
            Stop("python", "client", ("Table.pull", "checks arguments"), 150),
            Stop("native", "the call", ("unique, route", "writes frames"), 120),
            Stop("system", "shared memory", ("one mailbox", "a futex, if one sleeps"), 160),
            Stop("native", "shard: its thread", ("reads the frame", "takes the turn"), 150),
            Stop("native", "engine", ("fence, lease, table", "gathers the rows"), 150),
        ),
        "rows are copied twice: into the mailbox, and out of it to where the caller wants them",
    ),
}


def main() -> None:
    FILE.write_text(drawing(), encoding="utf-8")
    print(FILE)


def drawing() -> str:
    """The picture as SVG."""
    height = TOP + len(WAYS) * (ROW + 2 * GAP) + 6
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="{TITLE}">',
        f"<title>{TITLE}</title>",
        f"<style>{STYLE}</style>",
        '<defs><marker id="n" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
        'orient="auto-start-reverse"><path class="al" d="M0 0L10 5L0 10z"/></marker></defs>',
    ]
    left = 14
    for kind, meaning in KINDS.items():
        out.append(f'<rect class="{kind}" x="{left}" y="12" width="18" height="14" rx="3"/>')
        out.append(f'<text class="s" x="{left + 25}" y="23">{meaning}</text>')
        left += 210
    for number, (name, (stops, copies)) in enumerate(WAYS.items()):
        out += _way(TOP + number * (ROW + 2 * GAP), name, stops, copies)
    return "\n".join([*out, "</svg>", ""])


def _way(top: int, name: str, stops: tuple[Stop, ...], copies: str) -> list[str]:
    out = [
        f'<rect class="box" x="8" y="{top}" width="{WIDTH - 16}" height="{ROW + GAP}" rx="10"/>',
        f'<text x="20" y="{top + 19}"><tspan class="t">{name}</tspan><tspan class="s" dx="12">{copies}</tspan></text>',
    ]
    space = (WIDTH - 40 - sum(stop.width for stop in stops)) // (len(stops) - 1)
    left, middle = 20, top + 80
    for number, stop in enumerate(stops):
        if number:
            out.append(
                f'<path class="l" d="M{left - space + 2} {middle} L{left - 2} {middle}" '
                'marker-start="url(#n)" marker-end="url(#n)"/>'
            )
        out.append(f'<rect class="{stop.kind}" x="{left}" y="{top + 32}" width="{stop.width}" height="94" rx="7"/>')
        center = left + stop.width // 2
        out.append(f'<text class="t m" x="{center}" y="{top + 54}">{stop.name}</text>')
        for line, text in enumerate(stop.lines):
            out.append(f'<text class="s m" x="{center}" y="{top + 76 + 17 * line}">{text}</text>')
        left += stop.width + space
    return out


if __name__ == "__main__":
    main()
