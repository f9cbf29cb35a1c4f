"""Put what ``geartrain bench gear`` measured last into docs/explanation/gear.md: its tables and its plots.

The bench leaves its figures in .cache/gear; what it did not measure is left out. ``--png FOLDER``: the plots as
PNG, too. Needs matplotlib: pip install '.[bench]'.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Annotated, Any

import matplotlib.pyplot as plt
import plots
import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from geartrain.ams.values.text import counted

REPOSITORY = Path(__file__).resolve().parent.parent
KEPT = REPOSITORY / ".cache" / "gear"
DOCS = REPOSITORY / "docs" / "explanation"
BEGIN, END = "<!-- measured: python scripts/gear_document.py -->", "<!-- end of measured -->"


def main(
    png: Annotated[Path | None, typer.Option(help="Also write the plots as PNG into this folder.")] = None,
    kept: Annotated[Path, typer.Option(help="Where the bench left its figures.")] = KEPT,
    docs: Annotated[Path, typer.Option(help="The folder of gear.md.")] = DOCS,
) -> None:
    """Rewrite the measured part of docs/explanation/gear.md and docs/explanation/gear-*.svg."""
    drawn = []
    for name, (title, draw) in PLOTS.items():
        figure = draw(kept)
        if figure is not None:
            drawn.append(f"\n![{title}](gear-{name}.svg)\n")
            plots.save(figure, docs / f"gear-{name}.svg")
            if png is not None:
                png.mkdir(parents=True, exist_ok=True)
                figure.savefig(png / f"gear-{name}.png", dpi=150)
            plt.close(figure)
    document = docs / "gear.md"
    text = document.read_text(encoding="utf-8")
    head, rest = text.split(BEGIN, 1)
    _, tail = rest.split(END, 1)
    document.write_text(head + BEGIN + "\n" + tables(kept) + "".join(drawn) + "\n" + END + tail, encoding="utf-8")


def tables(kept: Path) -> str:
    """Everything that was measured, in Markdown."""
    parts = [_rows(kept, "throughput", "Each id 50 times"), _rows(kept, "expiry", "500 steps of page views by expiry")]
    parts += [_equal_time(kept), *(_equal_steps(kept, m) for m in (4, 16))]
    if not any(parts):
        return "\nNot measured yet: `geartrain bench gear`, then this script.\n"
    return "".join((_machine(kept), *parts))


def _machine(kept: Path) -> str:
    found = load(kept, "machine")
    if found is None:
        return ""
    place = f"{found['date']}, {found['cpu']}, {found['cores']} cores, torch {found['torch']}"
    load_average = max((load(kept, path.stem).get("load", 0.0) for path in kept.glob("*.json")), default=0.0)
    busy = ", beside other work: only the ratios mean something" if load_average > 2 else ""
    return f"\n{place}; load average up to {load_average:g}{busy}.\n"


def _rows(kept: Path, name: str, title: str) -> str:
    found = load(kept, name)
    if found is None:
        return ""
    lines = [
        f"\n**{title}** ({found['setting']}):\n",
        "| M | expiry | steps | gear training | conventional | speed-up | by the formula | hit rate | by the formula |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['M']:g} | {row['expire_seconds']:g} s | {row['steps']} | {row['gear_seconds']:.1f} s "
        f"| {row['conventional_seconds']:.1f} s | {row['speed_up']:.1f} | {row['formula_speed_up']:.1f} "
        f"| {row['hit_rate']:.2f} | {row['formula_hit_rate']:.2f} |"
        for row in found["rows"]
    ]
    return "\n".join(lines) + "\n"


def _equal_time(kept: Path) -> str:
    found = load(kept, "equal_time")
    if found is None:
        return ""
    ends = {name: curve[-1] for name, curve in found["curves"].items()}
    told = "; ".join(f"{name} {100 * auc:.2f} in {steps} steps" for name, (_, steps, auc) in ends.items())
    seconds = next(iter(ends.values()))[0]
    return f"\n**AUC after {seconds:.0f} s each** ({found['setting']}): {told}.\n"


def _equal_steps(kept: Path, gradients_per_id: int) -> str:
    found = load(kept, f"equal_steps_{gradients_per_id}")
    if found is None:
        return ""
    pairs = [(seed["gear training"][-1], seed["conventional"][-1]) for seed in found["seeds"]]
    points = [100 * (ours[2] - theirs[2]) for ours, theirs in pairs]
    error = statistics.stdev(points) / len(points) ** 0.5 if len(points) > 1 else float("nan")
    means = [100 * statistics.mean(end[2] for end in side) for side in zip(*pairs, strict=True)]
    return (
        f"\n**AUC after {pairs[0][0][1]} steps each**, {len(points)} seeds ({found['setting']}): {means[0]:.2f} "
        f"against {means[1]:.2f}, a difference of {statistics.mean(points):+.2f} ± {error:.2f} points.\n"
    )


def draw_time(kept: Path) -> Figure | None:
    """Time of a run by expiry."""
    found = load(kept, "expiry")
    if found is None:
        return None
    figure, axes = plt.subplots(figsize=(4.8, 3.2))
    rows = found["rows"]
    axes.plot(
        [row["expire_seconds"] for row in rows], [row["gear_seconds"] for row in rows], "o-", label="gear training"
    )
    formula = [row["conventional_seconds"] / row["formula_speed_up"] for row in rows]
    axes.plot([row["expire_seconds"] for row in rows], formula, "k:", label="by the formula")
    axes.axhline(rows[0]["conventional_seconds"], color="tab:orange", ls="--", label="conventional")
    axes.set(xlabel="expiry, s", ylabel=f"seconds for {rows[0]['steps']} steps", ylim=(0, None))
    return _finish(figure, axes)


def draw_auc(kept: Path) -> Figure | None:
    """AUC over the time of training."""
    found = load(kept, "equal_time")
    if found is None:
        return None
    figure, axes = plt.subplots(figsize=(4.8, 3.2))
    for name, style in (("gear training", "o-"), ("conventional", "s--")):
        seconds, _, aucs = zip(*found["curves"][name][1:], strict=True)
        axes.plot(seconds, aucs, style, label=name, ms=3)
    axes.set(xlabel="seconds of training", ylabel="AUC of the test views")
    return _finish(figure, axes)


def draw_convergence(kept: Path) -> Figure | None:
    """Accuracy over steps, by expiry and by number of workers."""
    expiry, workers = load(kept, "by_expiry"), load(kept, "by_workers")
    if expiry is None or workers is None:
        return None
    figure, sides = plt.subplots(2, figsize=(4.8, 7), sharey=True)
    for name, runs in expiry.items():
        _mean_curve(sides[0], runs, name, "k--" if name == "conventional" else "-")
    colours = dict(zip(("1", "2", "4"), ("tab:blue", "tab:orange", "tab:green"), strict=True))
    for key, runs in workers.items():
        kind, count = key.split(", ")
        name = f"{kind}, {counted(int(count), 'worker')}"
        _mean_curve(sides[1], runs, name, "-" if kind == "gear" else "--", colours.get(count))
    sides[0].set(xlabel="steps", ylabel="top-1, a font not seen", title="By expiry, one worker")
    sides[1].set(xlabel="steps of each worker", ylabel="top-1, a font not seen", title="By workers, expiry 20 s")
    return _finish(figure, *sides)


def _mean_curve(
    axes: Axes, runs: list[list[tuple[int, float]]], name: str, style: str, colour: str | None = None
) -> None:
    steps = [step for step, _ in runs[0]]
    heights = [statistics.mean(run[place][1] for run in runs) for place in range(len(steps))]
    axes.plot(steps, heights, style, label=name, lw=1.2, **({"color": colour} if colour else {}))


PLOTS = {
    "time": ("Seconds of a run by expiry", draw_time),
    "auc": ("AUC over the time of training", draw_auc),
    "convergence": ("Accuracy over steps, by expiry and by number of workers", draw_convergence),
}


def _finish(figure: Figure, *sides: Axes) -> Figure:
    for axes in sides:
        axes.grid(alpha=0.3)
        axes.legend()
    return figure


def load(kept: Path, name: str) -> Any:
    """What the bench left under a name; None: nothing."""
    path = kept / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


if __name__ == "__main__":
    typer.run(main)
