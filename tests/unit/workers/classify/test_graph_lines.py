"""What a person hears while a graph is built."""

from __future__ import annotations

from geartrain.workers.classify.graph_progress import GraphProgressPrinter


def test_a_build_after_one_that_was_cancelled_is_timed_from_its_own_beginning() -> None:
    said: list[str] = []
    times = iter([100.0, 140.0, 1000.0, 1010.0, 1020.0])
    lines = GraphProgressPrinter(50, said.append, clock=lambda: next(times))
    for done in (10, 80, 0, 50, 100):  # the first one ends at 80
        lines(done, 100)
    assert said[1:] == ["Graph of 50 classes: 50 %, 10 s left", "Graph of 50 classes built in 20.0 s"]


def test_the_time_left_of_a_resumed_build_is_of_the_pairs_still_to_compare() -> None:
    said: list[str] = []
    times = iter([100.0, 100.1, 110.1])
    lines = GraphProgressPrinter(50, said.append, clock=lambda: next(times))
    for done in (40, 80, 90):  # two finished parts, then a block that took 10 s
        lines(done, 100)
    assert said == ["Graph of 50 classes: 90 %, 10 s left"]
