"""The look of the plots in docs/: light or dark as the page around them, and the same file for the same figures.

Needs matplotlib: pip install '.[bench]'.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
from matplotlib.figure import Figure

DARK = {
    "#ffffff": "#1f222b",
    "#000000": "#d5dae3",
    "#b0b0b0": "#8b93a1",
    "#cccccc": "#4b5262",
    "#1f77b4": "#58a6ff",
    "#2ca02c": "#56d364",
    "#d62728": "#ff7b72",
    "#9467bd": "#c297ff",
}
"""Colours of matplotlib's default style, and those that stand for them on a dark page."""
mpl.rcParams.update({"svg.hashsalt": "geartrain", "svg.fonttype": "none", "font.size": 11, "legend.fontsize": 10})


def save(figure: Figure, path: Path) -> None:
    """Write the figure as SVG. It stays readable at the width of a phone if it is 4.8 inches wide."""
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    text = path.read_text(encoding="utf-8")
    for colour in DARK:
        text = text.replace(colour, f"var(--c{colour[1:]})")
    light = "; ".join(f"--c{colour[1:]}: {colour}" for colour in DARK)
    dark = "; ".join(f"--c{colour[1:]}: {shown}" for colour, shown in DARK.items())
    style = (
        f"svg {{ {light}; background: var(--cffffff) }} text {{ fill: var(--c000000) }}\n"
        f"@media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}\n"
    )
    text = text.replace("</style>", f"\n{style}</style>", 1)
    path.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n", encoding="utf-8")
