"""What the ranks tell one another before the first collective of a split layer: whether it can begin, and of what."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from geartrain.ams.values.errors import SpecMismatch, SyncError
from geartrain.bridge.collectives.link import RankLink
from geartrain.bridge.parallel.split.labels import check_labels

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32)
_WHAT = ("the layer", "the width", "the dtype", "whether a gradient is wanted")
_NOTHING = [0] * (1 + len(_WHAT))


class StepAgreement:
    """One of a model on ranks; each of its split layers asks it how many samples the ranks have. Not thread-safe.

    A rank that fails before it comes to its first split layer says so in the exchange that the others wait in, so that
    all of them raise; see :meth:`tell`.
    """

    def __init__(self, link: RankLink) -> None:
        self._link = link
        self._has_asked = False
        self._labels: Tensor | None = None
        self._ignore_index = -100
        self._labels_are_known = False
        self.layers: list[str] = []
        """Names of the split layers, the same on every rank."""

    def begin(self, labels: Tensor | None, ignore_index: int) -> None:
        """A forward pass begins; ``labels`` [S] are known before the loss is, None if not."""
        self._has_asked, self._labels_are_known = False, False
        self._labels, self._ignore_index = labels, ignore_index

    def end(self) -> None:
        """It has ended."""
        self._labels = None

    def check_labels(self, num_samples: int, num_classes: int) -> None:
        """Look at the labels, if they are known, on the way to :meth:`sizes`. Raises what ``check_labels`` does."""
        if self._labels is not None:
            check_labels(self._labels, num_samples, num_classes, self._ignore_index)
            self._labels_are_known = True

    def knows(self, labels: Tensor) -> bool:
        """Whether all ranks know already that these labels are sound, and as many as samples."""
        return self._labels_are_known and self._labels is labels

    def sizes(self, layer: str, samples: Tensor, check: Callable[[], None]) -> list[int]:
        """Rows of ``samples`` [n, …] on each rank. One exchange of six integers between the hosts.

        ``check()`` raises what is wrong with them here. Raises that error, SyncError if it is another rank's, and
        SpecMismatch if ranks are at different layers or with different samples.
        """
        try:
            check()
        except Exception as exc:  # of any kind: the others wait for this rank
            return self._exchange(exc, _NOTHING)
        width = samples.shape[1:].numel()
        dtype = _DTYPES.index(samples.dtype) if samples.dtype in _DTYPES else len(_DTYPES)
        wants_gradient = torch.is_grad_enabled() and (samples.requires_grad or not samples.dtype.is_floating_point)
        return self._exchange(None, [len(samples), self.layers.index(layer), width, dtype, wants_gradient])

    def tell(self, failure: Exception) -> None:
        """Tell the others of an error before the first split layer, where they wait; later they find this rank gone."""
        if not self._has_asked:
            self._exchange(failure, _NOTHING)

    def _exchange(self, failure: Exception | None, numbers: list[int]) -> list[int]:
        self._has_asked = True
        said = self._link.exchange([failure is None, *numbers])
        if failure is not None:
            raise failure
        sound = [good for good, *_ in said]
        if 0 in sound:
            raise SyncError(f"the step did not begin: rank {sound.index(0)} failed; its error tells why")
        for rank, (_, _, *theirs) in enumerate(said):
            unlike = [what for what, one, other in zip(_WHAT, said[0][2:], theirs, strict=True) if one != other]
            if unlike:
                raise SpecMismatch(
                    f"rank 0 and rank {rank} disagree on {' and '.join(unlike)} of what they compute. Run the same "
                    "model in the same mode on every rank, with inputs of the same dtype"
                )
        return [size for _, size, *_ in said]
