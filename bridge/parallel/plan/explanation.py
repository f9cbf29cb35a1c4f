"""A plan in words and tables."""

from __future__ import annotations

from collections.abc import Sequence

from geartrain.bridge.parallel.plan.planned import ExpectedStep, PlannedCollective, PlannedPart


def memory_lines(parts: Sequence[PlannedPart], together: int, memory_bytes: int) -> list[str]:
    """What each part holds on the fullest rank, and whether it fits."""
    rows = [
        [
            part.name or ("model" if part.scope else "loss, rest"),
            part.scope or "-",
            f"{part.num_parameters:,}",
            *map(bytes_text, (part.parameter_bytes, part.gradient_bytes, part.optimizer_bytes)),
            bytes_text(part.activation_bytes),
            bytes_text(part.bytes),
        ]
        for part in parts
    ]
    head = ["part", "scope", "parameters", "weights", "gradients", "optimizer", "activations", "together"]
    return [
        "memory of the fullest rank",
        *_table(head, rows),
        f"together {bytes_text(together)} of {bytes_text(memory_bytes)}"
        + ("" if together <= memory_bytes else ": IT DOES NOT FIT"),
    ]


def collectives_lines(collectives: Sequence[PlannedCollective]) -> list[str]:
    """What travels in a step, in its order; nothing on one rank."""
    if not collectives:
        return []
    rows = [
        [
            one.collective.phase,
            one.part or "loss, rest",
            one.collective.kind,
            one.collective.what,
            str(one.times),
            bytes_text(one.collective.bytes),
            bytes_text(one.sent_bytes),
            seconds_text(one.seconds),
        ]
        for one in collectives
    ]
    return [
        "collectives of a step",
        *_table(["when", "part", "kind", "what", "times", "bytes each", "a rank sends", "alone"], rows),
        f"a rank sends {bytes_text(sum(one.sent_bytes for one in collectives))} a step",
        "",
    ]


def step_lines(step: ExpectedStep, without_overlap: ExpectedStep, samples_per_second: float) -> list[str]:
    """How long it is to take."""
    slowed = f" (it slows the computation by {seconds_text(step.slowed)})" if step.slowed else ""
    return [
        f"expected step {seconds_text(step.seconds)}: forward {seconds_text(step.forward)}, "
        f"backward {seconds_text(step.backward)}, update {seconds_text(step.update)},",
        f"  communication {seconds_text(step.communication)}, of which {seconds_text(step.hidden)} hidden{slowed}",
        f"  without overlap {seconds_text(without_overlap.seconds)}; {samples_per_second:,.0f} samples/s of all ranks",
    ]


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Columns as wide as their contents, the first ones to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    texts = {column for column in range(len(head)) if not any(row[column][:1].isdigit() for row in rows)}
    return [
        "  "
        + "  ".join(
            text.ljust(width) if column in texts else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, *rows)
    ]


def bytes_text(number: float) -> str:
    """As "1.5 GB", of 10^9 bytes."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:,.1f} {unit}"
    return f"{number:,.0f} B"


def seconds_text(number: float) -> str:
    """As "1.50 ms"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if number >= size:
            return f"{number / size:,.2f} {unit}"
    return f"{number / 1e-6:,.1f} µs"
