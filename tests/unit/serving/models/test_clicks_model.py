"""Click models as they are served: the answers of ``geartrain predict``, rankings, contributions, sentences."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from geartrain.ams.values.errors import GeartrainError, InvalidArgument, ModelDamaged
from geartrain.ams.values.strings import hash_strings
from geartrain.serving.answers import Operation, concatenated
from geartrain.serving.folder import load_folder, load_newest
from geartrain.serving.models import clicks
from geartrain.serving.models.click_network import ClickNetwork
from geartrain.serving.models.clicks import ClicksModel
from geartrain.serving.models.request_samples import with_histories
from geartrain.workers import jobs
from geartrain.workers.ctr.export import export_clicks
from geartrain.workers.ctr.predict import predict_clicks
from geartrain.workers.ctr.recipe import CtrRecipe
from geartrain.workers.ctr.samples.click_samples import PADDING, ClickSamples, split
from geartrain.workers.ctr.samples.features import ids_by_feature
from geartrain.workers.ctr.samples.movielens import read_movielens
from geartrain.workers.job.options import JobOptions
from tests.support.command_line import typed
from tests.support.movielens_files import WORD_OF, write_movielens
from tests.support.served_models import require_onnx

CACHE = Path(".cache")


def trained(folder: Path, model: str, history: int, **others: Any) -> Path:
    films = write_movielens(folder / "films")
    recipe = CtrRecipe(
        model=model, dim=4, hidden=(8,), batch_size=50, steps=40, row_lr=0.1, split="time", history=history, **others
    )
    options = JobOptions(job="ctr", out=folder / "run", recipe=recipe, data=str(films), loggers=())
    jobs.train(options, Console(quiet=True))
    return folder / "run"


def held_out(folder: Path, history: int) -> ClickSamples:
    return split(read_movielens(folder / "films"), "time", 0, history=history)[1]


def as_json(samples: ClickSamples) -> list[dict[str, Any]]:
    """As a client sends them."""
    found: list[dict[str, Any]] = []
    for at in range(len(samples)):
        fields = {name: np.atleast_1d(ids[at]) for name, ids in samples.fields.items()}
        bags = {name: [WORD_OF.get(id, id) for id in ids.tolist() if id != PADDING] for name, ids in fields.items()}
        sample: dict[str, Any] = {name: bag[0] if len(bag) == 1 else bag for name, bag in bags.items()}
        if samples.histories is not None:
            places, _ = samples.histories.take(np.array([at]))
            events = zip(samples.histories.items[places], samples.histories.outcomes[places], strict=True)
            sample["history"] = [[int(item), int(outcome)] for item, outcome in events]
        found.append(sample)
    return json.loads(json.dumps(found))


def asked(operation: Operation, body: dict[str, Any]) -> list[Any]:
    return operation.write(operation.run(operation.read(body)))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model of a run, the run and its films: fields, bags, crosses and the sum of a history."""
    require_onnx()
    folder = tmp_path_factory.mktemp("wide")
    export_clicks(trained(folder, "wide_deep", 4), folder / "model", cache=CACHE, say=print)
    return folder


def score_samples(folder: Path, test: ClickSamples) -> np.ndarray:
    pytest.importorskip("pyarrow", reason="samples from files need the extra data")
    from tests.unit.workers.ctr.test_ctr_predict import write_samples

    write_samples(folder / "late.parquet", test)
    return predict_clicks(folder / "run", str(folder / "late.parquet"), cache=CACHE, say=print)


def require_as_predicted(folder: Path, history: int) -> None:
    test = held_out(folder, history)
    model = load_folder(folder / "model")
    answers = asked(model.operations["click"], {"samples": as_json(test)})
    found = [answer["probability"] for answer in answers]
    np.testing.assert_allclose(found, score_samples(folder, test), atol=1e-5)
    assert np.std(found) > 0.01, "a model that knows nothing shows nothing"


def test_answers_are_those_of_predict(wide: Path) -> None:
    require_as_predicted(wide, 4)


@pytest.mark.parametrize("model", ["dien", "crossmedia"])
def test_models_that_read_a_history_answer_as_predict(tmp_path: Path, model: str) -> None:
    require_onnx()
    export_clicks(trained(tmp_path, model, 3), tmp_path / "model", cache=CACHE, say=print)
    require_as_predicted(tmp_path, 3)


def test_requests_together_are_answered_as_alone(wide: Path) -> None:
    model = load_folder(wide / "model")
    click = model.operations["click"]
    samples = as_json(held_out(wide, 4))[:40]
    alone = [asked(click, {"samples": [sample]})[0]["probability"] for sample in samples]
    questions = [click.read({"samples": [sample]}) for sample in samples]
    by_shape: dict[Any, list[int]] = {}
    for at, question in enumerate(questions):
        by_shape.setdefault(tuple(array.shape for array in question.arrays.values()), []).append(at)
    assert len(by_shape) < len(samples) / 2, "bags of about a length can be joined"
    for places in by_shape.values():
        joined = click.run(concatenated([questions[at] for at in places]))["probability"]
        np.testing.assert_allclose(joined, [alone[at] for at in places], atol=1e-6)


def test_ranking_is_that_of_the_probabilities_of_all_candidates(wide: Path) -> None:
    model = load_folder(wide / "model")
    samples = as_json(held_out(wide, 4))
    context_names = [name for name in samples[0] if name not in ("item", "genres", "year")]
    context = {name: samples[0][name] for name in context_names}
    candidates = [{name: sample[name] for name in ("item", "genres", "year")} for sample in samples[:21]]
    (ranked,) = asked(model.operations["rank"], {"context": context, "candidates": candidates, "k": 5})
    each = asked(model.operations["click"], {"samples": [{**context, **one} for one in candidates]})
    expected = np.array([one["probability"] for one in each])
    best = np.argsort(-expected, kind="stable")[:5]
    assert [one["candidate"] for one in ranked] == best.tolist()
    np.testing.assert_allclose([one["probability"] for one in ranked], expected[best], atol=1e-6)
    (fewer,) = asked(model.operations["rank"], {"context": context, "candidates": candidates[:2], "k": 9})
    assert len(fewer) == 2


def test_many_candidates_are_scored_in_parts(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = load_folder(wide / "model").operations["rank"]
    body = rank.request["example"]
    questions = [rank.read({**body, "candidates": body["candidates"][:2], "k": 2}) for _ in range(5)]
    question, scored, logits = concatenated(questions), list[int](), ClickNetwork.logits
    whole = rank.run(question)

    def count(network: ClickNetwork, inputs: Any) -> Any:
        scored.append(len(inputs["vectors"]))
        return logits(network, inputs)

    monkeypatch.setattr(ClickNetwork, "logits", count)
    monkeypatch.setattr(clicks, "_AT_ONCE", 4)
    parts = rank.run(question)
    assert scored == [4, 4, 2]
    np.testing.assert_array_equal(parts["candidate"], whole["candidate"])
    np.testing.assert_allclose(parts["probability"], whole["probability"], atol=1e-6)


def test_arrays_are_answered_as_json_is(wide: Path) -> None:
    model = load_folder(wide / "model")
    samples = as_json(held_out(wide, 4))[:3]
    items = ("item", "genres", "year")
    context = {name: value for name, value in samples[0].items() if name not in items}
    candidates = [{name: sample[name] for name in items} for sample in samples[:2]]
    for name, body in {
        "click": {"samples": samples},
        "rank": {"context": context, "candidates": candidates, "k": 1},
    }.items():
        operation = model.operations[name]
        read = operation.read(body)
        arrays = {key.removeprefix("candidate/"): array for key, array in read.arrays.items()}
        arrays.pop("num_candidates", None)
        for key in ("gender", "occupation", "zip", "genres"):
            words = [WORD_OF.get(id, "text" * (id != PADDING)).encode() for id in arrays[key].ravel().tolist()]
            arrays[key] = np.array(words, object).reshape(arrays[key].shape)
        again = operation.accept(arrays, {"k": 1} if name == "rank" else {})
        for key, found in operation.run(read).items():
            np.testing.assert_array_equal(operation.run(again)[key], found)
    with pytest.raises(InvalidArgument, match="array 'user' is float64"):
        model.operations["click"].accept({"user": np.zeros(2)}, {})


@pytest.mark.parametrize("wide_as", [4, 6])
def test_rows_of_fewer_candidates_rank_those_alone(wide: Path, wide_as: int) -> None:
    model = load_folder(wide / "model")
    rank, items = model.operations["rank"], ("item", "genres", "year")
    samples = as_json(held_out(wide, 4))[:4]
    context = {name: value for name, value in samples[0].items() if name not in items}
    candidates = [{name: sample[name] for name in items} for sample in samples]
    read = rank.read({"context": context, "candidates": candidates, "k": 4})
    arrays = {key.removeprefix("candidate/"): array for key, array in read.arrays.items()}
    arrays.pop("num_candidates")
    for key in ("gender", "occupation", "zip", "genres"):
        words = [WORD_OF.get(id, "text" * (id != PADDING)).encode() for id in arrays[key].ravel().tolist()]
        arrays[key] = np.array(words, object).reshape(arrays[key].shape)
    both = {name: np.repeat(array, 2, 0) for name, array in arrays.items()}
    for name in items:
        nothing = b"" if both[name].dtype == object else PADDING
        both[name][1, 3:] = nothing
        width = [(0, 0), (0, wide_as - 4), *[(0, 0)] * (both[name].ndim - 2)]
        both[name] = np.pad(both[name], width, constant_values=nothing)
    answered = rank.run(rank.accept(both, {"k": wide_as}))
    for row, count in enumerate((4, 3)):
        body = {"context": context, "candidates": candidates[:count], "k": count}
        (alone,) = rank.write(rank.run(rank.read(body)))
        assert answered["candidate"][row].tolist() == [one["candidate"] for one in alone] + [-1] * (4 - count)
        np.testing.assert_allclose(answered["probability"][row, :count], [one["probability"] for one in alone])
        assert np.isnan(answered["probability"][row, count:]).all()
    for name in items:
        both[name][1, 1] = both[name][1, 3]
    with pytest.raises(InvalidArgument, match=r"candidate \[1, 1\] is missing; each row has one at least"):
        rank.accept(both, {})


@pytest.mark.parametrize(("operation", "name"), [("click", "item"), ("click", "history_items"), ("rank", "user")])
def test_arrays_of_several_numbers_of_items_are_refused(wide: Path, operation: str, name: str) -> None:
    asked = load_folder(wide / "model").operations[operation]
    arrays = {
        spec.name: np.full((3, 1, 1)[: len(spec.shape)], b"text" if spec.dtype == "object" else 1, spec.dtype)
        for spec in asked.inputs
    }
    asked.accept(arrays, {})
    with pytest.raises(InvalidArgument, match="the inputs have several numbers of items"):
        asked.accept({**arrays, name: arrays[name][:1]}, {})


def log_odds(probability: float) -> float:
    return float(np.log(probability / (1 - probability)))


def test_base_and_contributions_add_up_to_the_log_odds(wide: Path) -> None:
    click = load_folder(wide / "model").operations["click"]
    samples = as_json(held_out(wide, 4))[:40]
    plain = asked(click, {"samples": samples})
    for sample, alone, answer in zip(samples, plain, asked(click, {"samples": samples, "explain": True}), strict=True):
        assert set(answer["contributions"]) == set(sample)
        total = answer["base"] + sum(answer["contributions"].values())
        assert total == pytest.approx(log_odds(alone["probability"]), abs=1e-5)
        assert max(map(abs, answer["contributions"].values())) > 1e-3


def test_a_contribution_is_the_mean_of_what_a_field_adds_first_and_last(wide: Path) -> None:
    """Which is the Shapley value of two fields."""
    model = load_folder(wide / "model")
    assert isinstance(model, ClicksModel)
    network, click = model.network, model.operations["click"]
    fields = with_histories(click.read({"samples": as_json(held_out(wide, 4))[:20]}).arrays, 4)
    both = network.inputs(ids_by_feature(network.features, fields))
    user, item = network.without(both, "item"), network.without(both, "user")
    none = network.without(user, "user")
    added = network.logits(item) - network.logits(none) + network.logits(both) - network.logits(user)
    base, parts = network.contributions(both, ["user", "item"])
    np.testing.assert_array_equal(base, network.logits(none))
    np.testing.assert_allclose(parts[:, 1], added / 2, atol=1e-6)


def test_an_id_without_a_row_is_called_unseen(wide: Path) -> None:
    click = load_folder(wide / "model").operations["click"]
    sample = as_json(held_out(wide, 4))[0]
    known, unknown, nothing = (
        one["unseen"]
        for one in asked(
            click,
            {
                "samples": [
                    sample,
                    {**sample, "user": 10**15, "genres": ["Drama", "Tragedy"], "history": [[10**15, 10]]},
                    {**sample, "user": [], "genres": []},
                ],
                "explain": True,
            },
        )
    )
    assert (known, unknown, nothing) == ([], ["user", "genres", "history"], [])


def test_texts_are_hashed_as_in_training(wide: Path) -> None:
    click = load_folder(wide / "model").operations["click"]
    sample = as_json(held_out(wide, 4))[0]
    question = click.read({"samples": [{**sample, "zip": "90210"}]})
    np.testing.assert_array_equal(question.arrays["zip"], [hash_strings(["90210"])])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"itme": 3}, "sample 0 has a field 'itme'; a sample has 'user', 'item'"),
        ({"item": None}, "field 'item' of sample 0 is None; the model was trained on integers"),
        ({"item": 1.5}, "field 'item' of sample 0 is 1.5; the model was trained on integers"),
        ({"item": True}, "field 'item' of sample 0 is True; the model was trained on integers"),
        ({"item": -1}, "field 'item' of sample 0 is -1; the model was trained on integers there: give an integer"),
        ({"item": 2**63}, f"field 'item' of sample 0 is {2**63}; the model was trained on integers"),
        ({"item": 10**400}, "field 'item' of sample 0 is 10+... .401 characters.; the model was trained"),
        ({"genres": [7] * 10_001}, "field 'genres' of sample 0 has 10,001 entries; give at most 10,000"),
        ({"genres": [1, "a"]}, "field 'genres' of sample 0 is 1; the model was trained on lists of texts"),
        ({"genres": [[1]]}, r"field 'genres' of sample 0 is \[1\]; the model was trained on lists of texts"),
        ({"history": [7]}, r"field 'history' of sample 0 is \[7\]; it must be a list of events \[item, outcome\]"),
        ({"gender": "\ud800"}, "field 'gender' of sample 0 is '.ud800'; the model was trained on texts"),
        ({"occupation": [1, 2]}, r"field 'occupation' of sample 0 is \[1, 2\]; it must have one id"),
    ],
)
def test_what_cannot_be_a_sample_is_named(wide: Path, changes: dict[str, Any], sentence: str) -> None:
    click = load_folder(wide / "model").operations["click"]
    sample = {**as_json(held_out(wide, 4))[0], **changes}
    with pytest.raises(InvalidArgument, match=sentence):
        click.read({"samples": [sample]})


def test_requests_that_cannot_be_are_named(wide: Path) -> None:
    model = load_folder(wide / "model")
    sample = as_json(held_out(wide, 4))[0]
    click, rank = model.operations["click"], model.operations["rank"]
    missing = {name: value for name, value in sample.items() if name != "year"}
    for operation, body, sentence in [
        (click, {}, "samples is None; it must be a list"),
        (click, {"samples": []}, r"samples is \[\]; it must be a list"),
        (click, {"samples": [1]}, r"samples is \[1\]; it must be a list"),
        (click, {"samples": [sample], "k": 3}, "the body has 'k'; it may have 'samples', 'explain'"),
        (click, {"samples": [sample], "explain": 1}, "explain is 1; it must be true or false"),
        (click, {"samples": [sample, missing]}, "sample 1 has no field 'year', which the model was trained on"),
        (click, {"samples": [{**missing, "yeer": 1}]}, "no field 'year', which the model was trained on, but 'yeer'"),
        (rank, {"candidates": [{"item": 1}]}, "context is None; it must be an object"),
        (rank, {"context": sample, "candidates": [{"item": 1}]}, "field 'item' is in the context and in candidate 0"),
        (rank, {"context": missing, "candidates": [{"year": 1}, {}]}, "candidate 1 has no field 'year'"),
        (rank, {"context": missing, "candidates": [{"year": 1}], "k": 0}, "k is 0"),
    ]:
        with pytest.raises(InvalidArgument, match=sentence):
            operation.read(body)


def test_damaged_folders_are_named(wide: Path, tmp_path: Path) -> None:
    def copy(name: str) -> Path:
        import shutil

        return shutil.copytree(wide / "model", tmp_path / name)

    table = "tables/0.safetensors"
    cut = copy("cut")
    (cut / table).write_bytes((cut / table).read_bytes()[:-64])
    changed = copy("changed")
    data = bytearray((changed / table).read_bytes())
    data[-1] ^= 1
    (changed / table).write_bytes(data)
    gone = copy("gone")
    (gone / table).unlink()
    for folder in (cut, changed, gone):
        with pytest.raises(ModelDamaged, match=table):
            load_folder(folder)


def test_tables_of_another_model_are_named(wide: Path) -> None:
    """As one sealed by hand could be: what a checksum cannot see."""
    from geartrain.workers.models.saved_model import read_config

    config = read_config(wide / "model")
    swapped = json.loads(json.dumps(config))
    mapped = swapped["tables"]
    mapped[0]["file"], mapped[-1]["file"] = mapped[-1]["file"], mapped[0]["file"]
    with pytest.raises(ModelDamaged, match=r"has rows float32 .* those of table"):
        ClicksModel(wide / "model", swapped)
    lacking = json.loads(json.dumps(config))
    del lacking["tables"][0]
    with pytest.raises(ModelDamaged, match="the table of feature 'user', of dim 4, is not there"):
        ClicksModel(wide / "model", lacking)
    wider = json.loads(json.dumps(config))
    wider["features"].pop()
    with pytest.raises(ModelDamaged, match="they are of two models"):
        ClicksModel(wide / "model", wider)


def test_a_model_is_served_without_torch(wide: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from geartrain.serving.folder import load_folder; "
        f"m = load_folder(Path({str(wide / 'model')!r})); o = m.operations['rank']; "
        "print(o.write(o.run(o.read(o.request['example'])))); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_export_is_not_written_over_other_files(wide: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("notes")
    with pytest.raises(GeartrainError, match="holds other files"):
        export_clicks(wide / "run", tmp_path, cache=CACHE, say=print)


def test_an_export_by_command_says_what_it_holds(wide: Path, tmp_path: Path) -> None:
    done = typed("export", str(wide / "run"), "--to", str(tmp_path / "models"), "--keep", "3")
    assert done.returncode == 0, done.stderr
    assert "holds version 40, of step 40: the network wide_deep of 8 fields and" in done.stdout.replace("\n", " ")
    assert load_newest(tmp_path / "models")[1].version == 40
    kept = json.loads((tmp_path / "models" / "000040" / "examples.json").read_bytes())
    assert kept["choices"].keys() == {"genres", "year", "zip"}
    said = "examples.json has values of genres, item, year, zip, titles of items, for the page to try the model"
    assert f"{said}; leave them out by --no-examples" in done.stdout.replace("\n", " ")
    done = typed("export", str(wide / "run"), "--to", str(tmp_path / "without"), "--no-examples")
    assert done.returncode == 0 and "examples" not in done.stdout
    done = typed("export", str(wide / "run"), "--to", str(tmp_path / "n"), "--pairs", "lfw.bin")
    assert done.returncode and "--pairs lfw.bin is for models of pictures" in done.stderr.replace("\n", " ")


def test_a_form_begins_with_samples_unless_an_export_has_none(wide: Path, tmp_path: Path) -> None:
    shown = load_folder(wide / "model").operations["click"].request
    film = shown["properties"]["samples"]["items"]["properties"]["item"]["x-choices"][0]
    assert film["title"].startswith(f"Film {film['value']} (") and film["others"].keys() == {"genres", "year"}
    assert len(shown["examples"]) > 1
    for body in shown["examples"]:
        assert body["samples"][0]["user"] == body["samples"][0]["history"] == []
        assert body["samples"][0]["item"] > 0
    export_clicks(wide / "run", tmp_path / "model", cache=CACHE, say=print, examples=False)
    assert not (tmp_path / "model" / "examples.json").exists()
    click = load_folder(tmp_path / "model").operations["click"]
    assert click.request["examples"] == [click.request["example"]]
    assert click.request["example"]["samples"][0]["gender"] == "text"
    assert "x-choices" not in json.dumps(click.request)
    assert asked(click, click.request["example"])[0]["probability"] > 0
