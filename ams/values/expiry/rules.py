"""Expiry rules: by time since the last push, by norm, or by an expression or function of the user.

Shapes: N rows of a block, D = ``TableSpec.dim``. A rule is a function of a table's clock and its rows alone.
"""

from __future__ import annotations

import importlib
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from types import FunctionType
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt

from geartrain.ams.values.arguments import integer, real_number
from geartrain.ams.values.errors import ConfigError, InvalidArgument
from geartrain.ams.values.expiry.expressions import Expression

DEFAULT_EVERY = 1_000
_ENTRY_POINT = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")

Mask = npt.NDArray[np.bool_]
RuleFunction = TypeVar("RuleFunction", bound=Callable[..., Any])

_FUNCTIONS: dict[str, Callable[[RowBlock], Any]] = {}
"""Functions of this process that are marked as rules, by ``module:name``: the only ones a rule can name."""


@dataclass(frozen=True)
class RowBlock:
    """Block of a table's rows: the input of a rule."""

    ids: npt.NDArray[np.int64]
    """Ids [N]."""
    unseen_steps: npt.NDArray[np.float64]
    """[N]: steps of the table's clock since the row was last pushed or assigned."""
    unseen_seconds: npt.NDArray[np.float64]
    """[N]: seconds of the table's clock since then."""
    count: npt.NDArray[np.float64]
    """[N]: number of occurrences of the row in pushed batches."""
    read: Callable[[], npt.NDArray[np.float32]]
    """Function that reads the rows."""

    @cached_property
    def rows(self) -> npt.NDArray[np.float32]:
        """Rows [N, D]."""
        return self.read()

    @cached_property
    def norm(self) -> npt.NDArray[np.float64]:
        """[N]: the Euclidean norm of each row."""
        rows = self.rows.astype(np.float64)
        return np.asarray(np.linalg.norm(rows, axis=1), np.float64)


@dataclass(frozen=True, kw_only=True)
class Expiry(ABC):
    """A rule by which rows are removed. A table scans all of its rows every so many steps of its clock."""

    every: int = DEFAULT_EVERY
    """Steps of the table's clock, the largest step of any push, between two scans."""
    needs_lives: ClassVar[bool] = True
    """Whether it needs the time of a row's last push, or their number: 16 bytes a row."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "every", integer("every", self.every, 1, 2**62))

    @property
    def every_seconds(self) -> float | None:
        """Longest time between two scans, in seconds of the table's clock; None: only steps count."""
        return None

    @property
    def leap_steps(self) -> int:
        """Largest plausible advance of the table's clock by one push, in steps; a larger one makes a scan doubtful."""
        return self.every

    @property
    def goes_by(self) -> Collection[str]:
        """Names that it may use, of ``unseen_steps`` and ``unseen_seconds`` of a :class:`RowBlock`."""
        return ()

    @abstractmethod
    def expired(self, rows: RowBlock) -> Mask:
        """Return whether each row expires, [N]."""

    def require_usable(self) -> None:  # noqa: B027 (most rules can be used anywhere)
        """Raise InvalidArgument if it cannot be used in this process."""

    def to_json(self) -> dict[str, Any]:
        """Return the argument of :func:`expiry_from_json`."""
        return {"kind": type(self).__name__, **{name: item for name, item in asdict(self).items() if item is not None}}


@dataclass(frozen=True, kw_only=True)
class Unseen(Expiry):
    """Rule that removes rows without a push for more than ``steps``, or ``seconds``, of the table's clock."""

    steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.steps is None) == (self.seconds is None):
            raise InvalidArgument(
                f"Unseen has steps={self.steps} and seconds={self.seconds}; give one: gt.Unseen(steps=1_000_000)"
            )
        if self.steps is not None:
            object.__setattr__(self, "steps", integer("steps of Unseen", self.steps, 0, 2**62))
        else:
            seconds = real_number("seconds of Unseen", self.seconds)
            if not (math.isfinite(seconds) and seconds >= 0):
                raise InvalidArgument(f"seconds of Unseen is {self.seconds!r}; it must be finite and >= 0")
            object.__setattr__(self, "seconds", float(seconds))

    @property
    def every_seconds(self) -> float | None:
        """A quarter of ``seconds``, so that rows are removed soon after these are over."""
        return None if self.seconds is None else max(1.0, self.seconds / 4)

    @property
    def leap_steps(self) -> int:
        """At least a quarter of ``steps``: a table may not be pushed at each step."""
        return max(self.every, (self.steps or 0) // 4)

    @property
    def goes_by(self) -> Collection[str]:
        return ("unseen_seconds",) if self.steps is None else ("unseen_steps",)

    def expired(self, rows: RowBlock) -> Mask:
        if self.steps is not None:
            return rows.unseen_steps > self.steps
        assert self.seconds is not None
        return rows.unseen_seconds > self.seconds


@dataclass(frozen=True)
class SmallerThan(Expiry):
    """Rule that removes rows whose Euclidean norm is below ``l2``."""

    l2: float = field(kw_only=False)
    needs_lives: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        l2 = real_number("l2", self.l2)
        if not (math.isfinite(l2) and l2 > 0):
            raise InvalidArgument(f"l2 is {self.l2!r}; it must be finite and > 0: gt.SmallerThan(0.01)")
        object.__setattr__(self, "l2", float(l2))

    def expired(self, rows: RowBlock) -> Mask:
        return rows.norm < self.l2


@dataclass(frozen=True)
class Rule(Expiry):
    """Rule of the user: an expression, or a function of a module.

    ``gt.Rule("unseen_steps > 1000 and count < 3 and norm < 0.1")``: numbers, the names ``unseen_steps``,
    ``unseen_seconds``, ``count`` and ``norm``, ``+ - * /``, comparisons, ``and``, ``or``, ``not`` and parentheses.

    ``gt.Rule("package.module:function")``: a function from a :class:`RowBlock` to a bool for each row, decorated with
    :func:`expiry_rule`. Servers import the modules of their setting ``server.rule_modules`` (``--rule-modules
    package.module``); ``gt.local()`` uses the modules that are imported already. A name from a client or a snapshot is
    looked up, never imported.
    """

    rule: str = field(kw_only=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.rule, str):
            raise InvalidArgument(f"rule is {self.rule!r}; it must be a string: gt.Rule('unseen_steps > 1000')")
        if not self._is_entry_point:
            Expression.of(self.rule)

    @property
    def _is_entry_point(self) -> bool:
        return _ENTRY_POINT.fullmatch(self.rule) is not None

    @property
    def goes_by(self) -> Collection[str]:
        both = ("unseen_steps", "unseen_seconds")
        return both if self._is_entry_point else [name for name in both if name in self.rule]

    def expired(self, rows: RowBlock) -> Mask:
        """Return whether each row expires, [N]. Raises InvalidArgument if a user's function returns anything else."""
        if not self._is_entry_point:
            return Expression.of(self.rule).evaluate(rows)
        found = _function(self.rule)(rows)
        if not isinstance(found, np.ndarray) or found.dtype != np.bool_ or found.shape != rows.ids.shape:
            what = f"{found.dtype} {list(found.shape)}" if isinstance(found, np.ndarray) else type(found).__name__
            raise InvalidArgument(
                f"expiry rule {self.rule} gave {what} for {len(rows.ids)} rows; it must give a numpy array of one bool "
                "for each"
            )
        return found

    def require_usable(self) -> None:
        if self._is_entry_point:
            _function(self.rule)


def expiry_rule(function: RuleFunction) -> RuleFunction:
    """Register a function at the top of a module as a rule: ``gt.Rule("package.module:function")``.

    Raises InvalidArgument for anything else.
    """
    name = f"{getattr(function, '__module__', None)}:{getattr(function, '__qualname__', None)}"
    if not isinstance(function, FunctionType) or not _ENTRY_POINT.fullmatch(name):
        raise InvalidArgument(f"expiry rule {name} must be a function at the top of a module: def stale(rows): ...")
    _FUNCTIONS[name] = function
    return function


def import_rules(modules: Iterable[str]) -> None:
    """Import the modules of a server's expiry rules. Raises ConfigError for one that has none."""
    for module in modules:
        why = "it has no function decorated with @gt.expiry_rule"
        try:
            importlib.import_module(module)
        except Exception as exc:  # whatever the user's module raises
            why = f"{type(exc).__name__}: {exc}"
        if not any(name.startswith(f"{module}:") for name in _FUNCTIONS):
            raise ConfigError(
                f"rule_modules names {module!r}, which defines no rule here: {why}; name a module with functions "
                "decorated with @gt.expiry_rule, installed where the server runs or in a folder on PYTHONPATH"
            )


def _function(entry_point: str) -> Callable[[RowBlock], Any]:
    found = _FUNCTIONS.get(entry_point)
    if found is None:
        known = ", ".join(sorted(_FUNCTIONS)) or "none"
        module = entry_point.partition(":")[0]
        raise InvalidArgument(
            f"expiry rule {entry_point} is not known here (known: {known}); decorate a function at the top of {module} "
            f"with @gt.expiry_rule, and start the servers with --rule-modules {module} (server.rule_modules; for "
            f"gt.local(), import {module} first). No code is imported because a client or a snapshot names it"
        )
    return found


_KINDS: dict[str, type[Expiry]] = {kind.__name__: kind for kind in (Unseen, SmallerThan, Rule)}


def expiry_from_json(fields: Mapping[str, Any]) -> Expiry:
    """Return the rule of :meth:`Expiry.to_json`. Raises InvalidArgument."""
    kind = _KINDS.get(fields.get("kind", ""))
    if kind is None:
        raise InvalidArgument(f"expiry is {dict(fields)!r}; its kind must be one of {', '.join(_KINDS)}")
    try:
        return kind(**{name: value for name, value in fields.items() if name != "kind"})
    except TypeError as exc:
        raise InvalidArgument(f"expiry is {dict(fields)!r}: {exc}") from exc
