"""Logits whose classes are spread over ranks, and the operations on them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from geartrain.ams.values.errors import InvalidArgument, InvalidIds
from geartrain.ams.values.text import quoted
from geartrain.bridge.collectives.cross_entropy import LocalLabels, split_cross_entropy
from geartrain.bridge.parallel.split.agreement import LOSS, WHOLE, StepAgreement
from geartrain.bridge.parallel.split.shard import RowShard
from geartrain.bridge.parallel.split.travel import whole_rows

Number = int | float
_ELEMENTWISE: frozenset[Callable[..., Any]] = frozenset(
    [
        *(torch.tanh, torch.sigmoid, torch.relu, torch.exp, torch.abs, torch.neg, torch.clamp, torch.clip),
        *(torch.add, torch.sub, torch.mul, torch.div, torch.true_divide),
        *(F.relu, F.tanh, F.sigmoid, F.softplus, F.gelu, F.silu, F.leaky_relu, F.elu, F.hardtanh),
    ]
)
_MAY_DO = (
    "take F.cross_entropy or nn.CrossEntropyLoss of it, work elementwise on it with numbers (*, /, +, -, torch.tanh, "
    "logits.float()), or take logits.whole(), all classes of the own samples"
)


class _NoSuchOperation(InvalidArgument, AttributeError):
    """Error for an unsupported attribute, on which ``hasattr`` returns False."""


def _refused(what: str) -> str:
    return f"{what} is not for logits that are split over ranks: {_MAY_DO}"


class LogitsOperations(ABC):
    """Elementwise operations with numbers; other tensor operations are refused, with a list of the allowed ones."""

    @abstractmethod
    def mapped(self, operation: Callable[..., Tensor], arguments: tuple[Any, ...], options: dict[str, Any]) -> Self:
        """Return the logits of ``operation(logits, *arguments, **options)``; arguments are numbers."""

    def float(self) -> Self:
        return self._map(Tensor.float)

    def __mul__(self, other: Number) -> Self:
        return self._map(torch.mul, other)

    __rmul__ = __mul__

    def __truediv__(self, other: Number) -> Self:
        return self._map(torch.div, other)

    def __add__(self, other: Number) -> Self:
        return self._map(torch.add, other)

    __radd__ = __add__

    def __sub__(self, other: Number) -> Self:
        return self._map(torch.sub, other)

    def __neg__(self) -> Self:
        return self._map(torch.neg)

    def _map(self, operation: Callable[..., Tensor], *arguments: Any, **options: Any) -> Self:
        for value in (*arguments, *options.values()):
            if isinstance(value, Tensor | LogitsOperations):
                raise InvalidArgument(_refused(f"{getattr(operation, '__name__', operation)} with a tensor"))
        return self.mapped(operation, arguments, options)

    def __getitem__(self, key: object) -> NoReturn:
        """Raise InvalidArgument: indexing is not supported."""
        raise InvalidArgument(_refused("indexing"))

    def __getattr__(self, name: str) -> NoReturn:
        """Raise for attributes that only tensors have."""
        raise _NoSuchOperation(_refused(f".{name}"))

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        options = kwargs or {}
        if func in _ELEMENTWISE and args and isinstance(args[0], cls):
            options.pop("inplace", None)
            return args[0]._map(func, *args[1:], **options)
        raise InvalidArgument(_refused(getattr(func, "__name__", str(func))))


class LogitsMemory:
    """Permission for a loss's backward pass to write the gradient over the logits: if nothing else has used them."""

    def __init__(self, *, is_own: bool) -> None:
        """``is_own``: the memory holds nothing that autograd keeps for the backward pass."""
        self._is_own = is_own
        self._uses = 0
        self._is_taken = False

    def use(self) -> None:
        """Record a reader of the logits, in the graph or not. Raises InvalidArgument if they were overwritten."""
        if self._is_taken:
            raise InvalidArgument(
                "backward() has written the gradient over these logits, for nothing but the loss had used them; take "
                "what you need of them before it, as predicted = logits.whole().argmax(1)"
            )
        self._uses += 1

    def claim(self) -> bool:
        """Return whether the memory may be overwritten; if so, it counts as overwritten."""
        self._is_taken = self._is_own and self._uses == 1
        return self._is_taken


@dataclass(frozen=True, eq=False)
class SplitLogits(LogitsOperations):
    """Logits [S, C] of this rank's samples, of which no rank holds all.

    Each rank holds the logits of its own classes, of the samples of all ranks: ``local_BL``. ``F.cross_entropy`` (and
    so ``nn.CrossEntropyLoss``) with the own labels [S] is the loss over all classes and the samples of all ranks, the
    same number on every rank. Elementwise operations with numbers return such logits again. Anything else raises
    InvalidArgument: :meth:`whole` makes an ordinary tensor of it.
    """

    local_BL: Tensor
    """Part of an autograd graph; ``travel.py`` defines the scale of its gradient."""
    sizes: Sequence[int]
    """Number of samples of each rank."""
    shard: RowShard
    """Classes of this rank."""
    agreement: StepAgreement
    memory: LogitsMemory = field(default_factory=lambda: LogitsMemory(is_own=True))
    """Uses of the memory of ``local_BL``."""

    @property
    def shape(self) -> torch.Size:
        """Shape [S, C]."""
        return torch.Size((self.sizes[self.shard.group.link.rank], self.shard.num))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the logits."""
        return self.local_BL.dtype

    @property
    def device(self) -> torch.device:
        """Device of the logits."""
        return self.local_BL.device

    @property
    def ndim(self) -> int:
        """Number of dimensions, 2."""
        return 2

    def size(self, dim: int | None = None) -> Any:
        """Return the shape or one of its sizes, as a tensor does."""
        return self.shape if dim is None else self.shape[dim]

    def __len__(self) -> int:
        """Return S."""
        return self.shape[0]

    def whole(self) -> Tensor:
        """Return the logits of this rank's samples over all classes, [S, C]. Autograd passes through.

        Costs one all-to-all, and memory for S · C numbers. Every rank must call it. Raises SyncError if another rank
        failed.
        """
        self.agreement.agree(WHOLE, self.memory.use)
        whole_SC = whole_rows(self.local_BL, self.shard.group.link, self.sizes, self.shard.sizes)
        self.agreement.collectives_end()
        return whole_SC

    def mapped(
        self, operation: Callable[..., Tensor], arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> SplitLogits:
        self.memory.use()
        made = operation(self.local_BL, *arguments, **options)
        return SplitLogits(made, self.sizes, self.shard, self.agreement, LogitsMemory(is_own=False))

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.cross_entropy and args and isinstance(args[0], cls):
            return _cross_entropy(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


def _cross_entropy(
    logits: SplitLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    agreement, shard = logits.agreement, logits.shard
    if size_average is not None or reduce is not None:
        raise InvalidArgument(
            "size_average and reduce are given; cross entropy over split logits takes reduction alone"
        )
    _check_loss(reduction, label_smoothing, weight, shard.num)
    logits.memory.use()
    agreement.agree(LOSS, lambda: check_labels(target, logits.shape[0], shard.num, ignore_index))
    labels_B = shard.group.link.gather(target.to(logits.device), logits.sizes)
    counts_B = labels_B != ignore_index
    compute = torch.float64 if logits.local_BL.dtype == torch.float64 else torch.float32
    weight_C = None if weight is None else weight.detach().to(logits.device, compute)
    weights_B = counts_B.to(compute)
    if weight_C is not None:
        weights_B = weights_B * weight_C[labels_B.clamp(0, shard.num - 1)]
    labels = LocalLabels(
        places_B=labels_B - shard.first,
        counts_B=counts_B,
        weights_B=weights_B,
        smoothing=label_smoothing,
        num_classes=shard.num,
        weight_L=None if weight_C is None else weight_C[shard.first : shard.stop],
        total_weight=float(shard.num) if weight_C is None else weight_C.sum(),
    )
    losses_B = split_cross_entropy(logits.local_BL, labels, shard.group.link, takes_memory=logits.memory.claim)
    value = losses_B.sum() / weights_B.sum() if reduction == "mean" else losses_B.sum()
    agreement.collectives_end()
    return value


def _check_loss(reduction: str, smoothing: float, weight: Tensor | None, num_classes: int) -> None:
    """Raise InvalidArgument for settings that cannot be right; the same on every rank."""
    if reduction not in ("mean", "sum"):
        raise InvalidArgument(
            f"reduction is {reduction!r}; cross entropy over split logits takes 'mean' or 'sum', over the samples of "
            "all ranks"
        )
    if not 0 <= smoothing <= 1:
        raise InvalidArgument(f"label_smoothing is {smoothing!r}; it must be in [0, 1]")
    if weight is not None and weight.shape != (num_classes,):
        raise InvalidArgument(
            f"weight has shape {tuple(weight.shape)}; it must be one number for each of the {num_classes} classes, on "
            "every rank"
        )


def check_labels(labels: Any, num_samples: int | None, num_classes: int | None, ignore_index: int) -> None:
    """Raise InvalidIds or InvalidArgument unless ``labels`` are [S] int64 in [0, C), or ``ignore_index``.

    ``num_classes`` None: of any value. Those on a device are not checked, which would stall it: a label out of range
    makes the loss NaN.
    """
    if not isinstance(labels, Tensor) or labels.ndim != 1 or labels.dtype != torch.int64:
        given = f"{tuple(labels.shape)} {labels.dtype}" if isinstance(labels, Tensor) else quoted(labels)
        raise InvalidArgument(f"labels are {given}; they must be a tensor [S] of int64, a class for each sample")
    if num_samples is not None and len(labels) != num_samples:
        raise InvalidArgument(f"there are {len(labels)} labels and logits of {num_samples} samples; give one for each")
    if num_classes is not None and labels.device.type == "cpu":
        wrong = labels[((labels < 0) | (labels >= num_classes)) & (labels != ignore_index)]
        if len(wrong):
            raise InvalidIds(
                f"label {int(wrong[0])} is no class: they are 0 to {num_classes - 1}, or ignore_index={ignore_index}"
            )
