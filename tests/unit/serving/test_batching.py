"""Questions are joined by the clock, and each is answered once, by its own version."""

from __future__ import annotations

import functools
import threading
from concurrent.futures import Future

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from geartrain.ams.values.errors import Busy, InternalError, InvalidArgument
from geartrain.serving.answers import Arrays, Question
from geartrain.serving.batching import AnsweredBatch, Batcher
from geartrain.serving.catalog import Catalog
from tests.support.fake_servable import EchoModel


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Asked:
    """A model behind a batcher without threads."""

    def __init__(self, **settings: object) -> None:
        self.clock, self.model, self.catalog = Clock(), EchoModel(), Catalog()
        self.told: list[AnsweredBatch] = []
        self.catalog.add("m", self.model)
        self.batcher = Batcher(threads=0, clock=self.clock, on_batch=self.told.append, **settings)  # type: ignore[arg-type]

    def ask(self, *numbers: float, k: int = 1, is_read: bool = True) -> Future[Arrays]:
        question = Question(arrays={"numbers": np.array(numbers)}, parameters=(("k", k),))
        with self.catalog.lease("m") as lease:
            return self.batcher.submit(lease, "echo", question if is_read else lambda: question)


def said(future: Future[Arrays]) -> list[float]:
    return [float(number) for number in future.result(0)["said"][:, 1]]


def test_questions_that_wait_are_answered_together_unless_their_parameters_differ() -> None:
    asked = Asked()
    first, second, other, third = asked.ask(1), asked.ask(2, 3), asked.ask(4, k=10), asked.ask(5)
    assert asked.batcher.queued == 5
    while asked.batcher.answer_next():
        pass
    assert [said(future) for future in (first, second, other, third)] == [[1], [2, 3], [40], [5]]
    assert asked.model.batches == [4, 1]
    assert [(batch.questions, batch.items) for batch in asked.told] == [(3, 4), (1, 1)]
    assert asked.batcher.queued == 0


def test_a_batch_is_no_larger_than_it_may_be_but_for_one_question() -> None:
    asked = Asked(max_batch=4)
    futures = [asked.ask(1, 2, 3), asked.ask(4), asked.ask(5, 6), asked.ask(*range(20, 29)), asked.ask(7)]
    while asked.batcher.answer_next():
        pass
    assert asked.model.batches == [4, 2, 9, 1]
    assert [len(said(future)) for future in futures] == [3, 1, 2, 9, 1]


def test_an_idle_service_lets_nobody_wait_and_a_busy_one_for_no_longer_than_it_may() -> None:
    asked = Asked(max_wait_seconds=0.5, max_batch=3)
    assert asked.ask(1)
    running, _ = asked.batcher._next(asked.clock.now)  # is answered by another thread
    assert len(running) == 1
    late = asked.ask(2)
    assert not asked.batcher.answer_next()
    assert asked.batcher._next(asked.clock.now) == ([], pytest.approx(0.5))
    asked.clock.now += 0.4
    joined = asked.ask(3)
    assert not asked.batcher.answer_next()
    asked.clock.now += 0.11
    assert asked.batcher.answer_next()
    assert (said(late), said(joined)) == ([2], [3])
    for number in (4, 5, 6):
        asked.ask(number)
    assert asked.batcher.answer_next()  # it is full
    asked.ask(7)
    assert not asked.batcher.answer_next()
    asked.batcher._answer(running)
    assert asked.batcher.answer_next()
    assert asked.model.batches == [2, 3, 1, 1]


def test_who_has_waited_longest_is_answered_first() -> None:
    asked = Asked(max_batch=2)
    order: list[int] = []
    for number, k in enumerate((1, 2, 1, 2, 3, 1)):
        asked.clock.now += 1
        asked.ask(number, k=k).add_done_callback(functools.partial(lambda number, _: order.append(number), number))
    while asked.batcher.answer_next():
        pass
    assert order == [0, 2, 1, 3, 4, 5]


def test_too_many_that_wait_are_refused_and_the_others_answered() -> None:
    asked = Asked(max_queued=4)
    first = asked.ask(*range(9))  # alone, whatever its size
    with pytest.raises(Busy, match=r"9 items wait already, of 4 that may; ask again in a second"):
        asked.ask(1)
    assert asked.batcher.answer_next()
    assert len(said(first)) == 9
    assert asked.catalog.state("m")["loaded"][0]["asking"] == 0


def test_what_is_wrong_with_one_question_is_no_matter_of_the_others() -> None:
    asked = Asked()
    futures = [asked.ask(number) for number in (1, 2, 13, 3, 4)]
    assert asked.batcher.answer_next()
    assert [said(futures[at]) for at in (0, 1, 3, 4)] == [[1], [2], [3], [4]]
    with pytest.raises(InvalidArgument, match="13 is no number"):
        futures[2].result(0)


def test_a_question_is_read_where_it_is_answered_and_what_cannot_be_read_is_its_askers_alone() -> None:
    asked = Asked(max_queued=3)
    threads: list[str] = []

    def ask(number: float) -> Future[Arrays]:
        def read() -> Question:
            threads.append(threading.current_thread().name)
            if number == 7:
                raise InvalidArgument("7 cannot be read")
            return Question(arrays={"numbers": np.array([number, number])}, parameters=(("k", 1),))

        with asked.catalog.lease("m") as lease:
            return asked.batcher.submit(lease, "echo", read)

    futures = [ask(number) for number in (1, 7, 2)]
    with pytest.raises(Busy, match="3 items wait already"):
        ask(3)
    futures[2].cancel()
    assert threads == []
    assert asked.batcher.answer_next()
    assert said(futures[0]) == [1, 1]
    with pytest.raises(InvalidArgument, match="7 cannot be read"):
        futures[1].result(0)
    assert (len(threads), asked.model.batches, asked.batcher.queued) == (2, [2], 0)
    assert asked.catalog.state("m")["loaded"][0]["asking"] == 0


def test_an_operation_that_loses_items_is_a_bug_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked()
    monkeypatch.setattr(asked.model.operations["echo"], "run", lambda _: {"said": np.zeros((1, 2))})
    future = asked.ask(1, 2)
    asked.batcher.answer_next()
    with pytest.raises(InternalError, match="echo answered 2 items with 1 said"):
        future.result(0)


def test_an_asker_who_has_left_is_not_asked_about_and_its_version_is_let_go() -> None:
    asked = Asked()
    gone, stays = asked.ask(1), asked.ask(2)
    assert gone.cancel()
    for version in (2, 3):
        asked.catalog.add("m", EchoModel(version))
    assert not asked.model.is_closed  # the other still waits
    assert asked.batcher.answer_next()
    assert said(stays) == [2]
    assert asked.model.batches == [1]
    assert asked.model.is_closed
    lonely = asked.ask(3)
    lonely.cancel()
    assert not asked.batcher.answer_next()


def test_a_close_answers_all_that_waits_on_its_threads() -> None:
    model, catalog = EchoModel(), Catalog()
    catalog.add("m", model)
    model.may_answer.clear()
    batcher = Batcher(threads=2, max_wait_seconds=30)
    with catalog.lease("m") as lease:
        futures = [
            batcher.submit(lease, "echo", Question(arrays={"numbers": np.array([float(n)])}, parameters=(("k", 1),)))
            for n in range(50, 100)
        ]
        assert model.is_asked.wait(30)
        closing = threading.Thread(target=batcher.close)
        closing.start()
        model.may_answer.set()
        closing.join(30)
        assert [said(future) for future in futures] == [[float(n)] for n in range(50, 100)]
        with pytest.raises(Busy, match="ending"):
            batcher.submit(lease, "echo", Question(arrays={"numbers": np.array([1.0])}))


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("ask"), st.integers(1, 3), st.integers(1, 2)),
            st.tuples(st.just("wait"), st.integers(0, 9), st.just(0)),
            st.tuples(st.just("answer"), st.just(0), st.just(0)),
            st.tuples(st.just("swap"), st.just(0), st.just(0)),
            st.tuples(st.just("leave"), st.integers(0, 9), st.just(0)),
        ),
        max_size=60,
    ),
    st.integers(1, 5),
)
def test_every_question_is_answered_once_by_the_version_that_was_asked(
    steps: list[tuple[str, int, int]], max_batch: int
) -> None:
    asked = Asked(max_batch=max_batch, max_queued=40)
    models = [asked.model]
    questions: list[tuple[Future[Arrays], int, list[float]]] = []
    answers: list[int] = []
    for step, number, k in steps:
        if step == "ask":
            numbers = [float(100 * len(questions) + at) for at in range(number)]
            try:
                future = asked.ask(*numbers, k=k, is_read=number != 2)
            except Busy:
                continue
            future.add_done_callback(functools.partial(lambda at, _: answers.append(at), len(questions)))
            questions.append((future, models[-1].version, [number * k for number in numbers]))
        elif step == "wait":
            asked.clock.now += number / 1000
        elif step == "answer":
            asked.batcher.answer_next()
        elif step == "swap":
            models.append(EchoModel(len(models) + 1))
            asked.catalog.add("m", models[-1])
        elif questions:
            questions[number % len(questions)][0].cancel()
    asked.batcher.close()
    assert sorted(answers) == list(range(len(questions)))
    for future, version, wanted in questions:
        if not future.cancelled():
            assert future.result(0)["said"].tolist() == [[version, number] for number in wanted]
    assert asked.batcher.queued == 0
    assert all(size <= max(max_batch, 3) for model in models for size in model.batches)
    assert all(model.is_closed for model in models[:-2])
