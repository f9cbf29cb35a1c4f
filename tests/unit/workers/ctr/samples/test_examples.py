"""Examples of samples that a model keeps: what many users share, and nothing that one of them has alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from geartrain.ams.values.errors import ConfigError
from geartrain.ams.values.strings import hash_strings
from geartrain.workers.ctr.samples.click_samples import PADDING, ClickSamples, SampleSchema
from geartrain.workers.ctr.samples.examples import PEOPLE, examples_file, read_examples
from geartrain.workers.ctr.samples.kinds import BOOLEAN, INTEGER, TEXT, FieldKind
from geartrain.workers.ctr.samples.sources import own_samples

TOWNS = ("Bergen", "Oslo")
USERS = 400


def samples_of(**others: Any) -> ClickSamples:
    """Four samples of each user; a town is of half of them, an age of four, a shift of thirteen, a shoe size of one."""
    who = np.repeat(np.arange(USERS), 4)
    towns = hash_strings(list(TOWNS))
    fields = {
        "user": who,
        "town": towns[who % 2],
        "age": 20 + who % 100,
        "shoe": 1000 + who,
        "shift": who // 2 % 30,
        "is_new": (who % 4 == 0).astype(np.int64),
        "item": np.tile([7, 8, 9, 10], USERS) + 1000 * (who < PEOPLE - 1),
        "item_kind": np.tile(towns[[0, 0, 1, 1]], USERS),
    }
    kinds = dict.fromkeys(fields, FieldKind(item=INTEGER))
    kinds |= dict.fromkeys(("town", "item_kind"), FieldKind(item=TEXT)) | {"is_new": FieldKind(item=BOOLEAN)}
    schema = SampleSchema(item=("item", "item_kind"), user="user", kinds=kinds)
    words = dict(zip(towns.tolist(), TOWNS, strict=True))
    return ClickSamples(
        fields=fields,
        clicks=np.ones(len(who), np.float32),
        times=None,
        schema=schema,
        words=words,
        titles={item: f"Item {item}" for item in (7, 8, 1007)},
        **others,
    )


def found(samples: ClickSamples, *private: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(examples_file(samples, private))
    return content


def test_a_sample_keeps_what_many_users_share_together() -> None:
    kept = found(samples_of())
    assert 2 <= len(kept["samples"]) <= 5
    for sample in kept["samples"]:
        assert sample.keys() == {"town", "is_new", "item", "item_kind"}  # seven of a town share a shift
        assert sample["town"] in TOWNS and sample["is_new"] in (True, False) and sample["item"] in (7, 8, 9, 10)
        assert sample["item_kind"] == TOWNS[sample["item"] > 8]


def test_choices_are_values_of_many_users_and_items_have_names() -> None:
    kept = found(samples_of())
    of_users = {"town": list(TOWNS), "shift": list(range(30)), "is_new": [False, True]}
    assert kept["choices"] == {**of_users, "item_kind": list(TOWNS)}
    assert {one["item"] for one in kept["items"]} == {7, 8, 9, 10}  # nine users alone met the others
    assert (kept["item"], kept["titles"]) == ("item", {"7": "Item 7", "8": "Item 8"})


def test_no_id_of_a_user_and_no_value_of_one_alone_is_kept() -> None:
    text = examples_file(samples_of(), ()).decode()
    assert "user" not in text and "shoe" not in text and '"age"' not in text


def test_private_fields_are_left_out_and_an_item_with_its_id() -> None:
    kept = found(samples_of(), "town", "shift", "item")
    assert kept["choices"] == {"is_new": [False, True]}
    assert (kept["items"], kept["titles"], kept["item"]) == ([], {}, None)
    assert all(sample.keys() == {"is_new"} for sample in kept["samples"])
    with pytest.raises(ConfigError, match="private names 'twon', which is no field of the samples; they have 'user', "):
        examples_file(samples_of(), ("twon",))


def test_hashes_and_texts_nobody_knows_are_not_kept() -> None:
    samples = samples_of()
    kinds = {**samples.schema.kinds, "is_new": FieldKind(item=INTEGER, fold=True)}
    kept = found(replace(samples, schema=replace(samples.schema, kinds=kinds), words={}))
    assert kept["choices"] == {"shift": list(range(30))} and "is_new" not in json.dumps(kept)


def test_of_samples_without_users_only_fields_of_the_item_are_kept() -> None:
    samples = samples_of()
    names = {"user": "customer_id", "town": "email"}
    kinds = {names.get(name, name): kind for name, kind in samples.schema.kinds.items()}
    fields = {names.get(name, name): ids for name, ids in samples.fields.items()}
    kept = found(replace(samples, fields=fields, schema=replace(samples.schema, user=None, kinds=kinds)))
    assert kept["choices"] == {"item_kind": list(TOWNS)}
    assert kept["samples"] and all(sample.keys() == {"item", "item_kind"} for sample in kept["samples"])


def test_a_field_user_is_one_of_users_without_items_too(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    lines = [f"{1000 + who},person{who}@example.com,{TOWNS[who % 2]},1" for who in range(50) for _ in range(200)]
    (tmp_path / "own.csv").write_text("\n".join(["user,mail,city,click", *lines]), encoding="utf-8")
    samples = own_samples(str(tmp_path / "own.csv"))
    assert samples.schema.user is None
    kept = found(samples)
    assert kept["choices"] == {"city": list(TOWNS)}
    assert all(sample.keys() == {"city"} for sample in kept["samples"])


def test_lists_of_users_are_left_out_and_nobody_is_counted_by_them() -> None:
    samples = samples_of()
    kinds = {**samples.schema.kinds, "user": FieldKind(item=INTEGER, is_list=True)}
    fields = {**samples.fields, "user": samples.fields["user"][:, None] % 3}
    kept = found(replace(samples, fields=fields, schema=replace(samples.schema, user=None, kinds=kinds)))
    assert kept["choices"] == {"item_kind": list(TOWNS)}
    assert all(sample.keys() == {"item", "item_kind"} for sample in kept["samples"])


def test_texts_and_titles_of_a_parquet_file_are_known(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    columns = {
        "click": [0, 1] * 30,
        "time": list(range(60)),
        "user": list(range(60)),
        "town": [*TOWNS, None] * 20,
        "tags": [["old", "red"], [], None] * 20,
        "item": [1, 2, 3] * 20,
        "item_title": [*["One", "Two", None] * 19, "One", "a user's own words", None],
    }
    pq.write_table(pa.table(columns), tmp_path / "own.parquet", row_group_size=20)
    samples = own_samples(str(tmp_path / "own.parquet"))
    kept = found(samples)
    assert kept["titles"] == {"1": "One"}
    assert json.loads(examples_file(samples, ["item_title"]))["titles"] == {}
    assert kept["choices"]["town"] == list(TOWNS) and "tags" not in kept["choices"]
    assert {one["town"] for one in kept["samples"]} <= set(TOWNS)


def test_an_export_without_them_has_nothing(tmp_path: Path) -> None:
    assert read_examples(tmp_path) == {}


def test_many_users_share_the_combination_of_a_sample_with_its_item() -> None:
    """A town is of half of the users, and each item is met by all of one town and by three users of the other."""
    who = np.arange(USERS)
    fields = {"user": who, "town": hash_strings(list(TOWNS))[who % 2], "item": (who % 2 != (who < 6)) + 0}
    kinds = {"user": FieldKind(item=INTEGER), "town": FieldKind(item=TEXT), "item": FieldKind(item=INTEGER)}
    seen = set()
    for order in range(20):
        at = np.random.default_rng(order).permutation(USERS)
        samples = ClickSamples(
            fields={name: ids[at] for name, ids in fields.items()},
            clicks=np.ones(USERS, np.float32),
            times=None,
            schema=SampleSchema(item=("item",), user="user", kinds=kinds),
            words=samples_of().words,
        )
        seen |= {(sample.get("town"), sample["item"]) for sample in found(samples)["samples"]}
    assert seen == {("Bergen", 0), ("Oslo", 1)}


def test_an_item_is_shown_with_what_many_users_met_of_it() -> None:
    """The kind of half of the users is 0; each other one is that of five users with an item, and of twenty with any."""
    samples = samples_of()
    who, item = samples.fields["user"], samples.fields["item"]
    kind = np.where(who % 2, 0, (who + 20 * item) % 80 + 1)
    kinds = {**samples.schema.kinds, "item_kind": FieldKind(item=INTEGER)}
    schema = replace(samples.schema, kinds=kinds)
    kept = found(replace(samples, fields={**samples.fields, "item_kind": kind}, schema=schema))
    assert len(kept["choices"]["item_kind"]) == 41
    assert {one["item_kind"] for one in [*kept["items"], *kept["samples"]]} == {0}


def test_no_sample_begins_without_an_item() -> None:
    samples = samples_of()
    kinds = {**samples.schema.kinds, "item": FieldKind(item=INTEGER, fill=PADDING)}
    rng = np.random.default_rng(1)
    item = np.where(rng.random(len(samples)) < 0.5, PADDING, samples.fields["item"])
    kept = found(replace(samples, fields={**samples.fields, "item": item}, schema=replace(samples.schema, kinds=kinds)))
    assert kept["samples"] and all(sample["item"] in (7, 8, 9, 10) for sample in kept["samples"])
