"""Expressions over rows, as ``unseen_steps > 1000 and count < 3``: parsed by a whitelist, evaluated block by block."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from geartrain.ams.values.errors import InvalidArgument

NAMES = ("unseen_steps", "unseen_seconds", "count", "norm")
_LONGEST = 1_000
_DEEPEST = 50
_LARGEST = 1e300
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: np.add,
    ast.Sub: np.subtract,
    ast.Mult: np.multiply,
    ast.Div: np.divide,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: np.less,
    ast.LtE: np.less_equal,
    ast.Gt: np.greater,
    ast.GtE: np.greater_equal,
    ast.Eq: np.equal,
    ast.NotEq: np.not_equal,
}
_ALLOWED = f"numbers, {', '.join(NAMES)}, + - * /, comparisons, and, or, not, parentheses"

Evaluate = Callable[[Any], Any]


class ExpressionInput(Protocol):
    """Input of an expression: arrays [N] of :data:`NAMES`, each read only if it is named."""

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """Ids [N]."""


@dataclass(frozen=True)
class _Part:
    evaluate: Evaluate
    is_truth: bool
    """Whether it is a truth value, not a number."""


@dataclass(frozen=True)
class Expression:
    """Expression that is true or false of each row."""

    text: str
    _evaluate: Evaluate

    @staticmethod
    @lru_cache(maxsize=64)
    def of(text: str) -> Expression:
        """Parse an expression. Raises InvalidArgument that names the part that is not allowed, and what is."""
        if len(text) > _LONGEST:
            raise InvalidArgument(f"the rule has {len(text)} characters; it must have at most {_LONGEST}")
        try:
            tree = ast.parse(text.strip(), mode="eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as exc:
            where = f" at character {exc.offset}" if isinstance(exc, SyntaxError) and exc.offset else ""
            raise InvalidArgument(f"rule {text!r} does not parse{where}; it may have {_ALLOWED}") from exc
        part = _Parser(text.strip()).part(tree.body, _DEEPEST)
        if not part.is_truth:
            raise InvalidArgument(f"rule {text!r} is a number; compare it, as in 'unseen_steps > 1000'")
        return Expression(text, part.evaluate)

    def evaluate(self, rows: ExpressionInput) -> npt.NDArray[np.bool_]:
        """Return for each row whether it is true, [N]. A comparison with NaN, as of 0 / 0, is false."""
        with np.errstate(all="ignore"):
            found = self._evaluate(rows)
        return np.array(np.broadcast_to(found, rows.ids.shape), np.bool_)


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text

    def part(self, node: ast.expr, depth: int) -> _Part:
        if depth == 0:
            raise InvalidArgument(f"rule {self._text!r} is nested deeper than {_DEEPEST}; write it flatter")
        depth -= 1
        match node:
            case ast.Constant(value=bool()):
                raise self._refusal(node, f"allowed are {_ALLOWED}")
            case ast.Constant(value=int() | float() as value) if abs(value) < _LARGEST:
                number = float(value)
                return _Part(lambda _: number, is_truth=False)
            case ast.Name(id=name) if name in NAMES:
                return _Part(lambda rows: getattr(rows, name), is_truth=False)
            case ast.UnaryOp(op=ast.USub() | ast.UAdd() as op, operand=operand):
                sign = -1.0 if isinstance(op, ast.USub) else 1.0
                positive = self._number(operand, depth)
                return _Part(lambda rows: sign * positive(rows), is_truth=False)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                truth = self._truth(operand, depth)
                return _Part(lambda rows: np.logical_not(truth(rows)), is_truth=True)
            case ast.BinOp(left=left, op=binary, right=right) if type(binary) in _ARITHMETIC:
                first, second = self._number(left, depth), self._number(right, depth)
                operation = _ARITHMETIC[type(binary)]
                return _Part(lambda rows: operation(first(rows), second(rows)), is_truth=False)
            case ast.Compare(left=left, ops=ops, comparators=rights) if all(type(op) in _COMPARISONS for op in ops):
                return self._comparison([left, *rights], [_COMPARISONS[type(op)] for op in ops], depth)
            case ast.BoolOp(op=joint, values=values):
                truths = [self._truth(value, depth) for value in values]
                join = np.logical_and if isinstance(joint, ast.And) else np.logical_or
                return _Part(lambda rows: _joined(join, [truth(rows) for truth in truths]), is_truth=True)
            case _:
                raise self._refusal(node, f"allowed are {_ALLOWED}")

    def _comparison(self, nodes: list[ast.expr], comparisons: list[Callable[[Any, Any], Any]], depth: int) -> _Part:
        numbers = [self._number(node, depth) for node in nodes]

        def evaluate(rows: Any) -> Any:
            values = [number(rows) for number in numbers]
            pairs = zip(comparisons, values[:-1], values[1:], strict=True)
            return _joined(np.logical_and, [compare(value, following) for compare, value, following in pairs])

        return _Part(evaluate, is_truth=True)

    def _number(self, node: ast.expr, depth: int) -> Evaluate:
        part = self.part(node, depth)
        if part.is_truth:
            raise self._refusal(node, "a number is needed there, not what is true or false")
        return part.evaluate

    def _truth(self, node: ast.expr, depth: int) -> Evaluate:
        part = self.part(node, depth)
        if not part.is_truth:
            raise self._refusal(node, "compare it with something there, as in 'count < 3'")
        return part.evaluate

    def _refusal(self, node: ast.expr, why: str) -> InvalidArgument:
        found = ast.get_source_segment(self._text, node) or ast.unparse(node)
        return InvalidArgument(f"rule {self._text!r} has {found!r}: {why}")


def _joined(join: Callable[[Any, Any], Any], values: list[Any]) -> Any:
    joint = values[0]
    for value in values[1:]:
        joint = join(joint, value)
    return joint
