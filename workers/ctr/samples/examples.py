"""Examples for people who try a model: a few training samples, choices and names of items, without personal columns.

Ids of users, histories, hashes and columns named ``private`` are never kept. A value of another column is kept only if
:data:`PEOPLE` users have it, and a sample keeps several columns only if as many users share their combination, its item
and all columns of the item included. Without a field of users, which has one id a sample, only fields of the item are
kept, and samples are counted instead: :data:`EVENTS` of them.
Legend: N samples, L ids of the longest bag.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from geartrain.ams.values.errors import ConfigError
from geartrain.ams.values.specs import Ids
from geartrain.ams.values.text import quoted
from geartrain.workers.ctr.samples.click_samples import PADDING, TITLES, USER, ClickSamples
from geartrain.workers.ctr.samples.kinds import BOOLEAN, TEXT

FILE = "examples.json"
"""Name of the file in a job's snapshots, and in an export."""
PEOPLE, EVENTS = 10, 100
_LOOKED_AT = 200_000
_SAMPLES, _CHOICES, _ITEMS, _TITLES = 5, 100, 50, 20_000


def examples_file(samples: ClickSamples, private: Collection[str]) -> bytes:
    """Return JSON of ``samples``, ``choices`` of fields, popular ``items``, and ``titles`` by id of the field ``item``.

    Raises ConfigError for a ``private`` name that is no field.
    """
    if unknown := [name for name in private if name not in samples.fields]:
        known = ", ".join(map(repr, samples.fields))
        raise ConfigError(f"private names {quoted(unknown[0])}, which is no field of the samples; they have {known}")
    if not len(samples):
        return b"{}"
    some = samples.subset(np.random.default_rng(0).permutation(len(samples))[:_LOOKED_AT])
    schema, fields = some.schema, some.fields
    users, least = np.arange(len(some)), EVENTS
    user = schema.user or USER  # also a field of users where there are no items
    has_users = user in fields and fields[user].ndim == 1
    if has_users:
        users, least = np.unique(fields[user], return_inverse=True)[1], PEOPLE
    common = {
        name: _common_ids(some, name, users, least)
        for name in (fields if has_users else schema.item)
        if name not in (user, *private) and not schema.kinds[name].fold
    }
    item = tuple(name for name in schema.item if name in common)
    if item[:1] != schema.item[:1] or (item and fields[item[0]].ndim > 1):
        item = ()  # without its id, no field of it is shown
    known_items = common[item[0]] if item else np.empty(0, np.int64)
    popular = known_items[:_ITEMS]
    titles = {} if set(private).intersection(TITLES) else samples.titles
    items = np.zeros(len(some), np.int64)
    for name in item:
        items = _joined(items, fields[name])
    is_shared = _have_common(some, {name: popular if name in item[:1] else common[name] for name in item})
    rows = np.flatnonzero(some.is_known & is_shared & (not item or _users_of(items, users)[items] >= least))
    few = {name: ids for name, ids in common.items() if 0 < len(ids) <= _CHOICES}
    own = {name: ids for name, ids in few.items() if name not in schema.item and fields[name].ndim == 1}
    kept, chosen = _shared(some, own, items, rows, users, least)
    of_item: dict[int, int] = {}
    if item:
        chosen = chosen[_first(fields[item[0]][chosen])]
        ids, first = np.unique(fields[item[0]][rows], return_index=True)
        of_item = dict(zip(ids.tolist(), rows[first].tolist(), strict=True))
    return json.dumps(
        {
            "samples": [_sample(some, (*kept, *item), row) for row in chosen[:_SAMPLES].tolist()],
            "choices": {name: sorted(_values(some, name, few[name])) for name in (*own, *item[1:]) if name in few},
            "items": [_sample(some, item, of_item[one]) for one in popular.tolist() if one in of_item],
            "item": item[0] if item else None,
            "titles": {str(one): titles[one] for one in known_items[:_TITLES].tolist() if one in titles},
        },
        ensure_ascii=False,
    ).encode()


def read_examples(folder: Path) -> dict[str, Any]:
    """Return what :func:`examples_file` wrote to an export; empty if there is no file."""
    path = folder / FILE
    return json.loads(path.read_bytes()) if path.exists() else {}


def fields_shown(examples: Mapping[str, Any]) -> list[str]:
    """Return the fields that have values in the result of :func:`read_examples`."""
    each = [*examples.get("samples", ()), *examples.get("items", ()), examples.get("choices", {})]
    return sorted({name for values in each for name in values})


def _common_ids(samples: ClickSamples, name: str, users: Ids, least: int) -> Ids:
    """Return the ids of a field that enough users have and whose values are known, those of most users first."""
    ids = samples.fields[name].reshape(len(samples), -1)
    is_there = ids != PADDING
    if samples.schema.kinds[name].item == TEXT:
        is_there &= np.isin(ids, np.fromiter(samples.words, np.int64))
    found, codes = np.unique(ids[is_there], return_inverse=True)
    counts = _users_of(codes, np.broadcast_to(users[:, None], ids.shape)[is_there])
    order = np.argsort(-counts, kind="stable")
    return np.asarray(found[order][counts[order] >= least])


def _users_of(codes: Ids, users: Ids) -> Ids:
    """Return the number of users of each of the codes 0, 1, …"""
    pairs = np.unique(codes * (int(users.max(initial=0)) + 1) + users)
    return np.bincount(pairs // (int(users.max(initial=0)) + 1))


def _have_common(samples: ClickSamples, common: Mapping[str, Ids]) -> npt.NDArray[np.bool_]:
    """Return whether each sample has only common ids in these fields, bool [N]."""
    found = np.ones(len(samples), np.bool_)
    for name, known in common.items():
        ids = samples.fields[name].reshape(len(samples), -1)
        found &= (np.isin(ids, known) | (ids == PADDING)).all(1)
    return found


def _joined(codes: Ids, ids: Ids) -> Ids:
    """Return codes 0, 1, … of pairs: a sample's code, and its ids [N] or [N, L]."""
    found, own = np.unique(ids, return_inverse=True, axis=0 if ids.ndim > 1 else None)
    return np.asarray(np.unique(codes * len(found) + own.reshape(-1), return_inverse=True)[1])


def _first(codes: Ids) -> Ids:
    """Return the first place of each code, in ascending order."""
    return np.sort(np.unique(codes, return_index=True)[1])


def _shared(
    samples: ClickSamples, common: Mapping[str, Ids], items: Ids, rows: Ids, users: Ids, least: int
) -> tuple[list[str], Ids]:
    """Return fields whose combinations in ``rows`` enough users share, and those rows, distinct ones first.

    ``items`` are codes of the rows' items, a part of each combination. Fields with the fewest ids come first; one that
    would leave fewer combinations than samples are wanted is left out.
    """
    kept: list[str] = []
    codes, chosen, combinations = items, rows, min(len(_first(items[rows])), _SAMPLES)
    for name in sorted(common, key=lambda name: len(common[name])):
        joined = _joined(codes, samples.fields[name])
        is_shared = _users_of(joined, users)[joined] >= least
        left = rows[(is_shared & _have_common(samples, {name: common[name]}))[rows]]
        first = _first(joined[left])
        if len(first) >= combinations:
            kept, codes, rows = [*kept, name], joined, left
            chosen = np.concatenate([left[first], np.delete(left, first)])
            combinations = min(len(first), _SAMPLES)
    return kept, chosen


def _sample(samples: ClickSamples, names: Sequence[str], row: int) -> dict[str, Any]:
    """Return these fields of a sample as JSON values."""
    found = {}
    for name in names:
        values = _values(samples, name, np.atleast_1d(samples.fields[name][row]))
        found[name] = values if samples.schema.kinds[name].is_list else next(iter(values), None)
    return found


def _values(samples: ClickSamples, name: str, ids: Ids) -> list[Any]:
    item = samples.schema.kinds[name].item
    ids = ids[ids != PADDING]
    if item == TEXT:
        return [samples.words[one] for one in ids.tolist()]
    return ids.astype(bool).tolist() if item == BOOLEAN else ids.tolist()  # type: ignore[no-any-return]
