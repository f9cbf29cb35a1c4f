"""What may be said of samples of one's own: ``--set features.NAME.KEY=VALUE`` of a feature, ``--set kafka.KEY=VALUE``
of a topic, or a recipe in YAML.

Without torch: values only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from geartrain.ams.kernels.embedding import PoolingName
from geartrain.ams.values.admission.rules import Admission, MinCount, Probability
from geartrain.ams.values.errors import ConfigError, InvalidArgument
from geartrain.ams.values.expiry.rules import DEFAULT_EVERY, Expiry, Rule, Unseen
from geartrain.ams.values.text import quoted
from geartrain.workers.ctr.samples.kinds import BOOLEAN, INTEGER, TEXT

ITEMS = {"int64": INTEGER, "string": TEXT, "bool": BOOLEAN}
KINDS = (*ITEMS, *(f"list<{item}>" for item in ITEMS), "none")


@dataclass(frozen=True, kw_only=True)
class FileSettings:
    """How CSV files of samples are written: ``--set files.KEY=VALUE``, or a recipe in YAML."""

    names: tuple[str, ...] = ()
    """Their columns, in this order; none: the first line names them."""
    header: bool = True
    """Whether the first line names columns; ``names`` are in their place."""
    delimiter: str | None = None
    """None: a tab in .tsv files, else a comma."""
    list_delimiter: str = "|"

    def __post_init__(self) -> None:
        """Raises ConfigError that names the value."""
        for name in ("delimiter", "list_delimiter"):
            sign = getattr(self, name)
            if sign is not None and (len(sign) != 1 or not sign.isascii()):
                raise ConfigError(
                    f"files.{name} is {quoted(sign)}; it must be one ASCII character, such as ',' (a tab: "
                    f"--set 'files.{name}=\"\\t\"')"
                )
        if len(set(self.names)) < len(self.names):
            twice = next(name for name in self.names if self.names.count(name) > 1)
            raise ConfigError(f"files.names has {quoted(twice)} twice; give each column a name of its own")
        if not (self.names or self.header):
            raise ConfigError("files.header is false and files.names is empty; name the columns: files.names=[user, …]")


PLAIN_FILES = FileSettings()


@dataclass(frozen=True, kw_only=True)
class FeatureSettings:
    """Of a column; what is not said is inferred, or as of all features."""

    kind: str | None = None
    """The type of its values, of :data:`KINDS`; "none": the column is left alone."""
    hash: Literal["fold"] | None = None
    """"fold": its integers are any 64-bit values, which ``gt.fold_ids`` makes ids of. Texts are hashed in any case."""
    dim: int | None = None
    """Width of its embedding; None: the recipe's."""
    pooling: PoolingName = "mean"
    """Of a list."""
    history_of: str | None = None
    """The field whose ids a list holds, the oldest first: what the user did before. It shares that field's rows."""
    table: str | None = None
    """The feature, or a name of one's own, whose rows it shares; None: it has rows of its own."""
    admission: float | None = None
    """An id gets rows when it comes for so many times, or, of a number below 1, each time with that probability."""
    expiry: int | str | None = None
    """Rows go that were not pushed for so many steps, a quarter of these later at most, or those that an expression
    names, as of ``gt.Rule``."""
    max_bytes: int | None = None
    """Of memory for the rows of its embedding."""

    def __post_init__(self) -> None:
        """Raises ConfigError that names the value."""
        if self.kind not in (None, *KINDS):
            raise ConfigError(f"the kind of a feature is {quoted(self.kind)}; it must be one of {', '.join(KINDS)}")
        for name, least in (("dim", 1), ("max_bytes", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} is {value}; it must be at least {least}")
        if self.admission is not None and self.admission > 1 and self.admission % 1:
            raise ConfigError(
                f"admission is {self.admission}; it must be a whole number of times, or below 1, a probability: give "
                f"{self.admission:.0f}"
            )
        try:
            self.admission_rule(), self.expiry_rule()
        except InvalidArgument as exc:
            raise ConfigError(f"{exc} (admission: {self.admission}, expiry: {self.expiry})") from exc

    def admission_rule(self) -> Admission | None:
        """That of the tables. Raises InvalidArgument."""
        if self.admission is None:
            return None
        return Probability(self.admission) if self.admission < 1 else MinCount(int(self.admission))

    def expiry_rule(self) -> Expiry | None:
        """That of the tables. Raises InvalidArgument."""
        if self.expiry is None:
            return None
        if isinstance(self.expiry, str):
            return Rule(self.expiry)
        return Unseen(steps=self.expiry, every=min(DEFAULT_EVERY, max(1, self.expiry // 4)))


@dataclass(frozen=True, kw_only=True)
class KafkaSettings:
    """How the messages of a topic are read; all but ``format`` and ``start`` may be others when a run goes on."""

    format: Literal["json", "arrow"] = "json"
    """Of the messages: a JSON object each, or an Arrow IPC stream of many samples."""
    start: Literal["earliest", "latest"] = "earliest"
    """Where a new run begins."""
    until: Literal["now"] | datetime | None = None
    """Where reading ends: at what is there when the run begins, or before the first message of a time; None: it follows
    the topic until ``steps`` are done or somebody stops it."""
    max_wait_seconds: float = 1.0
    """A batch that is not full is trained on when its first sample has waited for so long."""
    timeout_seconds: float = 60.0
    """So long brokers that do not answer are waited for."""
    label_window_seconds: float | None = None
    """Messages are impressions and, later, clicks of them, as of ``gt.LateLabels``: for so long, by their ``time``, an
    impression waits for a click of its id, ``impression``; None: ``click`` of a message is final."""
    impression: Literal["int64", "string"] = "int64"
    """The type of that id."""
    skip_damaged: bool = False
    """Log messages that cannot be read and go on; otherwise they end the run."""

    def __post_init__(self) -> None:
        """Raises ConfigError that names the value."""
        for name in ("max_wait_seconds", "timeout_seconds"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"kafka.{name} is {getattr(self, name)}; it must be > 0")
        if self.label_window_seconds is not None and not 0 < self.label_window_seconds < math.inf:
            raise ConfigError(
                f"kafka.label_window_seconds is {self.label_window_seconds}; it must be > 0, or left out where a "
                "message has its click"
            )
