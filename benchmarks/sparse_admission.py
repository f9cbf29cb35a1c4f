"""Admission at Zipf keys: what a push takes and how many rows a table has, with ``gt.MinCount(3)`` and without.

Batches of 16,384 words as they are written, in the frequencies and all languages of the package ``wordfreq`` if it is
there, else of numpy's Zipf distribution; equal words are merged before, as an embedding does, and told how often they
were there. The rival is the same table without admission. Both have pushed the same number of batches; new words come
to the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from _calls import result
from _turns import median_seconds

import geartrain as gt
from geartrain.ams.values.specs import Ids
from geartrain.launch.bench import Result

BATCH, DIM, LR = 16_384, 16, 0.05
EARLIER, ROUNDS, CALLS = 150, 5, 20
MOST_SLOWER, FEWER = 1.15, 3.0
EXPONENT, MOST_WORDS = 1.1, 2**40


class Batch(NamedTuple):
    """Words of a batch, each once."""

    ids: Ids
    occurrences: npt.NDArray[np.uint32]
    gradients: npt.NDArray[np.float32]


def results(full: bool = False) -> Iterator[Result]:
    """The admission's cases of ``geartrain bench sparse``; ``full`` takes five times as many turns."""
    keys, words = _words()
    draw = _draws(words)
    with gt.local() as cluster:
        rules = {"all": None, "some": gt.MinCount(3)}
        made = {
            name: cluster.create_table(name, dim=DIM, optimizer=gt.Adagrad(LR), admission=rule)
            for name, rule in rules.items()
        }
        sides = [_pusher(table) for table in made.values()]
        for _ in range(EARLIER):
            batch = draw()
            for push in sides:
                push(batch)
        theirs, ours = median_seconds(sides, draw, rounds=ROUNDS * (5 if full else 1), calls=CALLS)
        rows = {table.name: table.rows for table in cluster.status().tables}
    case = f"MinCount(3), {keys}, D={DIM}, Adagrad, batch {BATCH:,}"
    yield result(f"push, {case}", 1e3 * ours, "without admission", 1e3 * theirs, "ms", target=1 / MOST_SLOWER)
    yield result(f"rows, {case}", rows["some"], "without admission", rows["all"], "rows", target=FEWER)


def _pusher(table: gt.Table) -> Callable[[Batch], None]:
    def push(batch: Batch) -> None:
        table.prepare_push(
            batch.ids, batch.gradients, known_finite=True, known_distinct=True, occurrences=batch.occurrences
        ).send()

    return push


def _draws(words: Callable[[np.random.Generator], Ids]) -> Callable[[], Batch]:
    random = np.random.default_rng(0)
    gradients = random.standard_normal((BATCH, DIM)).astype(np.float32)

    def draw() -> Batch:
        ids, counts = np.unique(words(random), return_counts=True)
        order = random.permutation(len(ids))
        return Batch(ids[order], counts[order].astype(np.uint32), gradients[: len(ids)])

    return draw


def _words() -> tuple[str, Callable[[np.random.Generator], Ids]]:
    """What the keys are, and who draws a batch of them."""
    try:
        from wordfreq import available_languages, get_frequency_dict
    except ImportError:
        return f"Zipf({EXPONENT}) keys", lambda random: np.minimum(random.zipf(EXPONENT, BATCH), MOST_WORDS)
    best = available_languages("best")
    frequencies = np.concatenate([list(get_frequency_dict(one, "best").values()) for one in sorted(best)])
    ends = np.cumsum(frequencies / frequencies.sum())
    return f"{len(ends):,} words of {len(best)} languages", lambda random: np.searchsorted(ends, random.random(BATCH))
