"""Clicked items of users: training samples, held-out items, and the recall of recommendation lists.

Legend: U test users, n items of a list.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from geartrain.ams.values.errors import ConfigError
from geartrain.ams.values.specs import Ids
from geartrain.bridge.retrieval.item_tree import leaf_ids
from geartrain.workers.ctr.samples.click_samples import ClickSamples, histories_after, histories_within, split
from geartrain.workers.tdm.recipe import TdmRecipe

HISTORY = "history"


@dataclass(frozen=True)
class ClickedItems:
    """Training samples and test users."""

    train: ClickSamples
    """Clicked samples, each with the latest ``recipe.history`` earlier clicked items of its user."""
    users: ClickSamples
    """One sample for each test user: its fields, with its latest ``recipe.history`` clicked training items."""
    seen: list[set[int]]
    """Items of each test user's training samples, clicked or not: lists leave them out."""
    wanted: list[set[int]]
    """Held-out items that each test user clicked, without those seen before."""
    items: Ids
    """All items, ascending."""
    user_fields: tuple[str, ...]

    def ids(self, samples: ClickSamples, indices: npt.NDArray[np.int64]) -> dict[str, Any]:
        """Return the ids of the samples' user fields, and the leaves of their histories."""
        assert samples.histories is not None
        places, offsets = samples.histories.take(indices)
        of_user = {name: samples.fields[name][indices] for name in self.user_fields}
        return {**of_user, HISTORY: (leaf_ids(samples.histories.items[places]), offsets)}

    def popular(self) -> Ids:
        """Return the items by descending number of training clicks."""
        clicked = self.train.fields[self.train.schema.item[0]]
        counts = np.bincount(np.searchsorted(self.items, clicked), minlength=len(self.items))
        return self.items[np.argsort(-counts, kind="stable")]


def split_clicks(samples: ClickSamples, recipe: TdmRecipe) -> ClickedItems:
    """Split samples as for a click model, and keep the clicked ones. Raises ConfigError without users and items."""
    schema = samples.schema
    if schema.user is None or not schema.item or samples.times is None:
        raise ConfigError("a tree needs fields user and item, and a column time; give samples that have them")
    item, user = schema.item[0], schema.user
    samples = samples.subset(np.flatnonzero(samples.is_known))
    known, held_out = split(samples, recipe.split, recipe.seed)
    clicked = np.flatnonzero(known.clicks > 0)
    learnt = known.subset(clicked)
    histories = histories_within(learnt, np.arange(len(learnt)), recipe.history)
    seen = _by_user(known.fields[user], known.fields[item])
    later = held_out.subset(np.flatnonzero(held_out.clicks > 0))
    wanted = {
        person: found
        for person, items in _by_user(later.fields[user], later.fields[item]).items()
        if (found := items - seen.get(person, set()))
    }
    if not wanted:
        raise ConfigError("no user clicked a new item in the samples held out; give more samples")
    _, first = np.unique(later.fields[user], return_index=True)
    users = later.subset(np.array([place for place in first if int(later.fields[user][place]) in wanted], np.int64))
    names = users.fields[user].tolist()
    return ClickedItems(
        train=replace(learnt, histories=histories),
        users=replace(users, histories=histories_after(learnt, replace(users, times=None), recipe.history)),
        seen=[seen.get(person, set()) for person in names],
        wanted=[wanted[person] for person in names],
        items=np.unique(samples.fields[item]),
        user_fields=tuple(name for name in samples.fields if name not in schema.item),
    )


def _by_user(users: Ids, items: Ids) -> Mapping[int, set[int]]:
    found: dict[int, set[int]] = {}
    for user, item in zip(users.tolist(), items.tolist(), strict=True):
        found.setdefault(user, set()).add(item)
    return found


def recall(lists: Ids, liked: ClickedItems, cut: int) -> float:
    """Return the share of a user's wanted items that are in its list, as the mean over users.

    ``lists`` [U, n]; of each, the first ``cut`` items that the user has not seen count.
    """
    parts = []
    for row, seen, wanted in zip(lists.tolist(), liked.seen, liked.wanted, strict=True):
        new = [item for item in row if item not in seen][:cut]
        parts.append(len(wanted.intersection(new)) / len(wanted))
    return float(np.mean(parts))
