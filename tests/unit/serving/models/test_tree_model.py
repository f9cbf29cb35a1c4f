"""Trees of items as they are served: the items that the search in torch finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import geartrain as gt
from geartrain.ams.values.errors import ConfigError, InvalidArgument
from geartrain.bridge.checkpoint.folder import read_record, read_state
from geartrain.serving.folder import load_folder
from geartrain.serving.models import tree
from geartrain.serving.models.click_network import ClickNetwork
from geartrain.workers import jobs
from geartrain.workers.ctr.samples.click_samples import ClickSamples
from geartrain.workers.ctr.samples.kinds import kinds_from_json
from geartrain.workers.ctr.samples.movielens import SCHEMA, read_movielens
from geartrain.workers.job.folder import read_run
from geartrain.workers.job.options import JobOptions
from geartrain.workers.job.ranks import JobRanks
from geartrain.workers.job.state import JobState, newest_snapshot
from geartrain.workers.job.trainer import Attempt
from geartrain.workers.models.saved_model import read_config
from geartrain.workers.tdm.export import export_tree
from geartrain.workers.tdm.recipe import TdmRecipe
from geartrain.workers.tdm.trainer import TreeTrainer
from tests.support.movielens_files import WORD_OF, write_movielens
from tests.support.served_models import require_onnx

RECIPE = TdmRecipe(dim=4, hidden=(8,), batch_size=40, steps=15, rebuilds=1, beam=50, history=5, row_lr=0.05)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a run, its films and the model made of it."""
    require_onnx()
    folder = tmp_path_factory.mktemp("tree")
    films = write_movielens(folder / "films")
    options = JobOptions(job="tdm", out=folder / "run", recipe=RECIPE, data=str(films), loggers=())
    jobs.train(options, Console(quiet=True))
    export_tree(folder / "run", folder / "model")
    return folder


def by_torch(folder: Path, k: int, beam: int) -> tuple[list[dict[str, Any]], np.ndarray, np.ndarray]:
    """Users as JSON, and what the search of the trained model finds for them."""
    snapshot = newest_snapshot(read_run(folder / "run").snapshots)
    state = JobState.read(snapshot, "tdm", TdmRecipe)
    with gt.local() as cluster:
        cluster.restore(snapshot.path)
        options = JobOptions(job="tdm", out=folder / "again", recipe=RECIPE)
        attempt = Attempt(
            options=options,
            progress=state.progress,
            cluster=cluster,
            ranks=JobRanks(),
            console=Console(quiet=True),
            state=state,
        )
        trainer = TreeTrainer(attempt, ("", read_movielens(folder / "films")))
        trainer.restore(state)
        users = trainer._liked.users
        everyone = np.arange(len(users))
        items, logits = trainer._tdm.retrieve(trainer._liked.ids(users, everyone), k=k, beam=beam)
        bodies = [as_json(users, trainer._liked.user_fields, at) for at in everyone]
    return bodies, items.numpy(), logits.numpy()


def as_json(users: ClickSamples, names: tuple[str, ...], at: int) -> dict[str, Any]:
    assert users.histories is not None
    places, _ = users.histories.take(np.array([at]))
    return {name: WORD_OF.get(id, id) for name in names for id in [int(users.fields[name][at])]} | {
        "history": users.histories.items[places].tolist()
    }


def test_the_saved_tree_says_what_its_fields_are(folder: Path) -> None:
    model = folder / "run" / "model"
    kinds = read_state(model, read_record(model))["values"]["kinds"]
    assert kinds_from_json(kinds) == SCHEMA.kinds
    assert read_config(folder / "model")["kinds"]["zip"] == kinds["zip"]
    assert kinds["zip"]["hash"] == "xxh3, 63 bits"
    with pytest.raises(ConfigError, match="use the version that trained the model"):
        kinds_from_json({"zip": {**kinds["zip"], "hash": "sha1"}})


def test_a_wide_beam_for_many_users_is_scored_in_parts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_folder(folder / "model")
    items, scored, logits = model.operations["items"], list[int](), ClickNetwork.logits
    question = items.read({"samples": [items.request["example"]["samples"][0]] * 40, "k": 5, "beam": 8})
    whole = items.run(question)

    def count(network: ClickNetwork, inputs: Any) -> Any:
        scored.append(len(inputs["vectors"]))
        return logits(network, inputs)

    monkeypatch.setattr(ClickNetwork, "logits", count)
    monkeypatch.setattr(tree, "_AT_ONCE", 64)
    parts = items.run(question)
    assert max(scored) <= 64
    np.testing.assert_array_equal(parts["item"], whole["item"])
    np.testing.assert_allclose(parts["score"], whole["score"], atol=1e-5)


@pytest.mark.parametrize("beam", [8, 50])
def test_items_are_those_of_the_search_in_torch(folder: Path, beam: int) -> None:
    samples, expected, logits = by_torch(folder, 8, beam)
    found = load_folder(folder / "model").operations["items"]
    answers = found.write(found.run(found.read({"samples": samples, "k": 8, "beam": beam})))
    np.testing.assert_allclose([[one["score"] for one in answer] for answer in answers], logits, atol=1e-4)
    same = np.mean([[one["item"] for one in answer] for answer in answers] == expected)
    assert same > 0.99, "but for equal scores"
    assert len(np.unique(expected)) > 8, "a tree that says the same to everybody shows nothing"


def test_the_latest_of_a_history_count(folder: Path) -> None:
    found = load_folder(folder / "model").operations["items"]
    sample = found.request["example"]["samples"][0]
    long, short = ([{**sample, "history": [9, 9, 9, 1, 2, 3, 4, 5][first:]}] for first in (0, 3))
    run = [found.run(found.read({"samples": samples})) for samples in (long, short)]
    np.testing.assert_array_equal(run[0]["score"], run[1]["score"])


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"samples": [{}]}, "sample 0 has no field 'user'"),
        ({"samples": [{}], "K": 3}, "the body has 'K'; it may have 'samples', 'k', 'beam'"),
        ({"k": 0}, "k is 0"),
        ({"k": 5, "beam": 4}, "beam is 4"),
        (
            {"history": ["anna"]},
            "field 'history' of sample 0 is 'anna'; the model was trained on lists of integers there",
        ),
        ({"history": [2**62]}, "the history has item 4611686018427387904; items lie in"),
    ],
)
def test_what_cannot_be_asked_is_named(folder: Path, body: dict[str, Any], sentence: str) -> None:
    operation = load_folder(folder / "model").operations["items"]
    sample = dict(operation.request["example"]["samples"][0])
    if "history" in body:
        sample["history"] = body.pop("history")
    with pytest.raises(InvalidArgument, match=sentence):
        operation.read({"samples": [sample], **body})
