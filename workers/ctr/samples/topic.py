"""Click samples in the messages of a Kafka topic: a key for each field, and ``click``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from geartrain.ams.values.errors import ConfigError, InvalidArgument
from geartrain.ams.values.text import quoted
from geartrain.workers.ctr.samples.click_samples import PADDING, ClickSamples
from geartrain.workers.ctr.samples.kinds import BOOLEAN, ID_OF_MISSING, INTEGER, TEXT, FieldKind
from geartrain.workers.ctr.samples.own import CLICK, TIME, require_values, schema_of
from geartrain.workers.ctr.samples.settings import ITEMS, FeatureSettings, KafkaSettings
from geartrain.workers.samples.columns import IN_THE_RECIPE, MISSING, NameRow, remedies, type_named
from geartrain.workers.samples.kafka.kafka_samples import KafkaSamples
from geartrain.workers.samples.late_labels import LateLabels
from geartrain.workers.samples.rows import ids_of_booleans, tensors_of_column

PREFIX = "kafka:"
IMPRESSION = LateLabels.id


class TopicSamples:
    """Samples in messages, whose fields ``features`` names."""

    images = None

    def __init__(
        self,
        source: str,
        batch_size: int,
        features: Mapping[str, FeatureSettings],
        said: KafkaSettings,
        ends: Mapping[int, int] | None = None,
    ):
        """``source`` is ``kafka:TOPIC@BROKERS``; ``ends`` are end offsets that replace ``said.until``.

        Raises ConfigError for what cannot be read, SourceNotFound and BrokerUnavailable.
        """
        self.topic, brokers = topic_and_brokers(source)
        self.kinds = {name: _kind_of(name, of, source) for name, of in features.items() if of.kind != "none"}
        if not self.kinds:
            raise ConfigError(
                f"{source} has no schema: name the fields of its messages and their kinds, such as "
                "--set features.user.kind=int64 --set features.item.kind=string"
            )
        self.fields, self.schema = tuple(self.kinds), schema_of(self.kinds)
        texts = [name for name, kind in self.kinds.items() if kind.item == TEXT]
        joined_by = {} if said.label_window_seconds is None else {IMPRESSION: said.impression, TIME: "float64"}
        if said.impression == "string" and joined_by:
            texts.append(IMPRESSION)
        fill: dict[str, Any] = {name: PADDING for name, kind in self.kinds.items() if kind.item == INTEGER}
        fill.update({name: MISSING for name, kind in self.kinds.items() if kind.item == BOOLEAN})
        try:
            self.messages = KafkaSamples(
                self.topic,
                brokers,
                schema={CLICK: "float32", **joined_by, **{name: str(features[name].kind) for name in self.kinds}},
                batch_size=batch_size,
                format=said.format,
                hash_strings=texts,
                late_labels=LateLabels(window_seconds=said.label_window_seconds) if said.label_window_seconds else None,
                fill=fill,
                fold=[name for name, kind in self.kinds.items() if kind.fold],
                start=said.start,
                until=said.until if ends is None else ends,
                max_wait_seconds=said.max_wait_seconds,
                skip_damaged=said.skip_damaged,
                timeout_seconds=said.timeout_seconds,
            )
        except InvalidArgument as exc:
            raise ConfigError(f"{source}: {exc}") from exc
        self.messages.tables.finish = self._finished

    def _finished(self, table: Any, name_row: NameRow) -> Any:
        """Return messages with booleans as ids. Raises SourceDamaged for an invalid id or click."""
        with remedies(IN_THE_RECIPE):
            for at, name in enumerate(table.column_names):
                kind = self.kinds.get(name)
                if kind is not None and kind.item == BOOLEAN:
                    table = table.set_column(at, name, ids_of_booleans(table.column(name), missing=PADDING))
                if name in (TIME, IMPRESSION) and kind is None:
                    continue
                require_values(name, kind, tensors_of_column(table.column(name)), name_row)
        return table

    def none(self) -> ClickSamples:
        """Return no samples, with these fields."""
        ids = {name: np.empty((0, 1) if kind.is_list else 0, np.int64) for name, kind in self.kinds.items()}
        return ClickSamples(fields=ids, clicks=np.empty(0, np.float32), times=None, schema=self.schema)


def topic_and_brokers(source: str) -> tuple[str, str]:
    """Return topic and brokers of ``kafka:TOPIC@BROKERS``. Raises ConfigError."""
    topic, sign, brokers = source.removeprefix(PREFIX).partition("@")
    if not (topic and sign and all(map(str.strip, brokers.split(",")))):
        raise ConfigError(
            f"--data is {quoted(source)}; a topic is kafka:TOPIC@BROKERS, such as kafka:clicks@broker-1:9092,broker-2"
        )
    return topic, brokers


def _kind_of(name: str, said: FeatureSettings, source: str) -> FieldKind:
    if name in (CLICK, TIME):
        raise ConfigError(f"features name {name!r}, which is no field: it is read as what it is; leave it out")
    if said.kind is None:
        raise ConfigError(
            f"the kind of {name!r} is not known: {source} has no schema; give --set features.{name}.kind=int64"
        )
    found = type_named(name, said.kind)
    item, is_folded = ITEMS[found.item], said.hash == "fold"
    if is_folded and item != INTEGER:
        raise ConfigError(f"features.{name}.hash is fold, and its kind is {said.kind}: fold integers only")
    return FieldKind(item=item, is_list=found.is_list, fill=ID_OF_MISSING[item], fold=is_folded)
