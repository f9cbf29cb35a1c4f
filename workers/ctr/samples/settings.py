"""Settings of one's own samples: of features by ``--set features.NAME.KEY=VALUE``, of a topic by ``--set
kafka.KEY=VALUE``, or by a recipe in YAML.

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
    """Format of CSV files of samples: ``--set files.KEY=VALUE``, or a recipe in YAML."""

    names: tuple[str, ...] = ()
    """Names of the columns, in order; none: the first line names them."""
    header: bool = True
    """Whether the first line names columns; ``names`` replace those."""
    delimiter: str | None = None
    """Character between columns; None: a tab in .tsv files, else a comma."""
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
    """Settings of a column; those left out are inferred, or the defaults of all features."""

    kind: str | None = None
    """Type of its values, one of :data:`KINDS`; "none": the column is ignored."""
    hash: Literal["fold"] | None = None
    """"fold": its integers are any 64-bit values, mapped to ids by ``gt.fold_ids``. Texts are always hashed."""
    dim: int | None = None
    """Width of its embedding; None: the recipe's."""
    pooling: PoolingName = "mean"
    """Pooling of a list."""
    history_of: str | None = None
    """Field whose ids the list holds, the oldest first, as the user's history; the column shares that field's rows."""
    table: str | None = None
    """Feature, or a name of one's own, whose rows the column shares; None: it has its own rows."""
    admission: float | None = None
    """Occurrences after which an id gets a row; or below 1, the probability of a row at each occurrence."""
    expiry: int | str | None = None
    """Steps without a push after which a row expires, or up to a quarter later; or an expression of rows to expire, as
    of ``gt.Rule``."""
    max_bytes: int | None = None
    """Most memory for the rows of its embedding."""

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
        for name, rule in (("admission", self.admission_rule), ("expiry", self.expiry_rule)):
            try:
                rule()
            except InvalidArgument as exc:
                raise ConfigError(f"{name} is {quoted(getattr(self, name))}: {exc}") from exc

    def admission_rule(self) -> Admission | None:
        """Return the admission rule of the tables. Raises InvalidArgument."""
        if self.admission is None:
            return None
        return Probability(self.admission) if self.admission < 1 else MinCount(int(self.admission))

    def expiry_rule(self) -> Expiry | None:
        """Return the expiry rule of the tables. Raises InvalidArgument."""
        if self.expiry is None:
            return None
        if isinstance(self.expiry, str):
            return Rule(self.expiry)
        return Unseen(steps=self.expiry, every=min(DEFAULT_EVERY, max(1, self.expiry // 4)))


@dataclass(frozen=True, kw_only=True)
class KafkaSettings:
    """Settings of reading a topic; all but ``format`` and ``start`` may change when a run continues."""

    format: Literal["json", "arrow"] = "json"
    """Format of a message: a JSON object, or an Arrow IPC stream of many samples."""
    start: Literal["earliest", "latest"] = "earliest"
    """Start of a new run."""
    until: Literal["now"] | datetime | None = None
    """End of reading: "now", the messages that are there when the run begins; a time, the first message of which ends
    it; None: the topic is followed until ``steps`` are done or the run is stopped."""
    max_wait_seconds: float = 1.0
    """Longest wait of a sample until its batch is trained on, even if that is not full."""
    timeout_seconds: float = 60.0
    """Longest wait for brokers that do not answer."""
    label_window_seconds: float | None = None
    """Longest wait of an impression, by ``time``, for a click with its ``impression`` id: messages are impressions and
    later clicks, as of ``gt.LateLabels``; None: ``click`` of a message is final."""
    impression: Literal["int64", "string"] = "int64"
    """Type of the impression's id."""
    skip_damaged: bool = False
    """Whether messages that cannot be read are logged and skipped; otherwise they end the run."""

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
