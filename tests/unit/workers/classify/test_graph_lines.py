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
