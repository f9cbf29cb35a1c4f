"""Click samples with sparse features, and their split into training and held-out ones."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from geartrain.ams.values.errors import ConfigError
from geartrain.ams.values.specs import Ids
from geartrain.ams.values.text import quoted
from geartrain.workers.ctr.samples.histories import Histories, histories_before
from geartrain.workers.ctr.samples.images import ItemImages
from geartrain.workers.ctr.samples.kinds import PADDING as PADDING
from geartrain.workers.ctr.samples.kinds import FieldKind, kinds_from_json, kinds_to_json

SPLITS = ("random", "time")
USER = "user"
"""Field of one's own samples whose ids are users."""
TITLES = ("item_title", "item_name")
"""Fields with texts that name an item."""
_MAX_VALIDATION = 20_000


@dataclass(frozen=True, kw_only=True)
class SampleSchema:
    """Roles and kinds of the fields of samples."""

    item: tuple[str, ...] = ()
    """Fields of the item, its own id first; all others are of the user and the moment."""
    user: str | None = None
    """Field whose ids are users, if users have histories; else None."""
    crosses: tuple[tuple[str, ...], ...] = ()
    """Tuples of fields whose ids together have a weight in a linear model; the last may be a bag."""
    kinds: Mapping[str, FieldKind] = field(default_factory=dict)
    """Kind of the values of each field."""

    def to_json(self) -> dict[str, Any]:
        """Return the schema as plain values."""
        crosses = [list(cross) for cross in self.crosses]
        return {"item": list(self.item), "user": self.user, "crosses": crosses, "kinds": kinds_to_json(self.kinds)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> SampleSchema:
        """Return the schema of :meth:`to_json`'s values."""
        crosses = tuple(tuple(cross) for cross in values["crosses"])
        kinds = kinds_from_json(values["kinds"])
        return cls(item=tuple(values["item"]), user=values["user"], crosses=crosses, kinds=kinds)


@dataclass(frozen=True, kw_only=True)
class ClickSamples:
    """N samples: the ids of every field, and clicks."""

    fields: Mapping[str, Ids]
    """[N], or [N, L] with :data:`PADDING` after the last id of each."""
    clicks: npt.NDArray[np.float32]
    """[N], 0 or 1."""
    times: Ids | None
    """[N], Unix seconds; None: unknown."""
    schema: SampleSchema
    outcomes: Ids | None = None
    """[N]: outcome of each sample, such as the rating; None: the click."""
    held_out_from: int | None = None
    """Unix seconds from which a split by time holds samples out; None: the start of the latest fifth."""
    images: ItemImages | None = None
    histories: Histories | None = None
    words: Mapping[int, str] = field(default_factory=dict)
    """Texts of ids, as far as they are known: for people, no model reads them."""
    titles: Mapping[int, str] = field(default_factory=dict)
    """Title of an item, by its id."""

    def __len__(self) -> int:
        return len(self.clicks)

    @property
    def is_known(self) -> npt.NDArray[np.bool_]:
        """Whether each sample's user and item are known, bool [N]: unknown users share no history."""
        schema = self.schema
        known = np.ones(len(self), np.bool_)
        for name in filter(None, (schema.user, *schema.item[:1])):
            if name in schema.kinds and schema.kinds[name].fill is not None and self.fields[name].ndim == 1:
                known &= self.fields[name] != schema.kinds[name].fill
        return known

    def ids(self, indices: npt.NDArray[np.int64]) -> dict[str, Ids]:
        """Return the ids of all fields of the samples at ``indices``."""
        return {name: ids[indices] for name, ids in self.fields.items()}

    def subset(self, indices: npt.NDArray[np.int64]) -> ClickSamples:
        """Return the samples at ``indices``."""
        return replace(
            self,
            fields=self.ids(indices),
            clicks=self.clicks[indices],
            times=None if self.times is None else self.times[indices],
            outcomes=None if self.outcomes is None else self.outcomes[indices],
            histories=None if self.histories is None else self.histories.subset(indices),
        )


def require_free(fields: Collection[str], own: Sequence[str]) -> None:
    """Raise ConfigError for a field with one of a model's ``own`` names."""
    if taken := [name for name in own if name in fields]:
        raise ConfigError(
            f"the samples have a column {taken[0]!r}, and this model uses that name itself (for histories of users, or "
            "nodes of a tree); rename the column"
        )


def split(
    samples: ClickSamples,
    kind: str,
    seed: int,
    *,
    history: int = 0,
    fresh: bool = False,
    validation: bool = False,
) -> tuple[ClickSamples, ClickSamples]:
    """Split samples into training and test samples.

    ``random``: the last fifth of a permutation by ``seed`` is tested. ``time``: samples from ``held_out_from`` on, or
    the latest fifth; equal times stay in order. With ``validation`` the training samples are split once more in the
    same way (by time: their latest fifth), and the test samples are dropped: use it to choose settings.

    With ``history`` > 0 a sample gets so many of the latest events of its user before it. An event is a strictly
    earlier training sample: so a history holds nothing of the future, and no outcome that is to be predicted. ``fresh``
    histories include test samples, as a service's do: all strictly earlier samples are events.

    Raises ConfigError for another kind, an empty part, missing times, users or items, or ``fresh`` histories with
    samples held out at random.
    """
    if fresh and kind != "time":
        raise ConfigError("fresh histories would contain the outcomes of samples held out at random; set split=time")
    train, test = _parted(samples, kind, seed, np.arange(len(samples)), samples.held_out_from)
    if validation:
        train, test = _parted(samples, kind, seed + 1, np.sort(train), None)
    if history:
        samples = replace(
            samples, histories=histories_within(samples, np.union1d(train, test) if fresh else train, history)
        )
    return samples.subset(train), samples.subset(test)


def part_validation(held_out: ClickSamples, seed: int) -> tuple[ClickSamples, ClickSamples]:
    """Split held-out samples at random: an eighth to choose the best step by, and the rest to test it."""
    order = np.random.default_rng(seed + 2).permutation(len(held_out))
    chosen, tested = np.split(order, [min(len(order) // 8, _MAX_VALIDATION)])
    return held_out.subset(np.sort(chosen)), held_out.subset(np.sort(tested))


def _parted(
    samples: ClickSamples, kind: str, seed: int, among: npt.NDArray[np.int64], held_out_from: int | None
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    if kind not in SPLITS:
        raise ConfigError(f"split is {quoted(kind)}; it must be one of {', '.join(SPLITS)}")
    held_out = len(among) // 5
    if kind == "random":
        order = among[np.random.default_rng(seed).permutation(len(among))]
    else:
        if samples.times is None:
            raise ConfigError("split is 'time', but the samples have no times; give them a column time, or take random")
        times = samples.times[among]
        order = among[np.argsort(times, kind="stable")]
        if held_out_from is not None:
            held_out = int((times >= held_out_from).sum())
    if not 0 < held_out < len(among):
        raise ConfigError(
            f"there are {len(among)} samples, {held_out} of them to be held out; give at least 5, and of several times"
        )
    return order[:-held_out], order[-held_out:]


def histories_within(samples: ClickSamples, events: npt.NDArray[np.int64], length: int) -> Histories:
    """Return the latest ``length`` of ``events``, indices of samples, before each sample. Raises ConfigError."""
    schema = samples.schema
    if schema.user is None or not schema.item or samples.times is None:
        raise ConfigError(
            "the samples have no histories, which need fields user and item, and a column time; take a model without: "
            "deepfm, wide_deep or dssm"
        )
    outcomes = samples.clicks.astype(np.int64) if samples.outcomes is None else samples.outcomes
    users, items = samples.fields[schema.user], samples.fields[schema.item[0]]
    events = events[samples.is_known[events]]
    return histories_before(users, items, outcomes, samples.times, events=events, length=length)


def histories_after(past: ClickSamples, samples: ClickSamples, length: int) -> Histories:
    """Return the latest ``length`` events of ``past`` before each of ``samples``; without times, of all events."""
    user, item = past.schema.user, past.schema.item[0]
    assert user is not None and past.times is not None
    outcomes = past.clicks.astype(np.int64) if past.outcomes is None else past.outcomes
    late, nothing = np.full(len(samples), max(past.times.max(), 0) + 1), np.zeros(len(samples), np.int64)
    histories = histories_before(
        np.concatenate([past.fields[user], samples.fields[user]]),
        np.concatenate([past.fields[item], nothing]),
        np.concatenate([outcomes, nothing]),
        np.concatenate([past.times, late if samples.times is None else samples.times]),
        events=np.flatnonzero(past.is_known),
        length=length,
    )
    return histories.subset(np.arange(len(past), len(past) + len(samples)))
