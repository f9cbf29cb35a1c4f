"""Labels on a device: checked there, errors raised at a later step, so that the host never waits for the backbone.

The step of a bad label changes no row: its loss is NaN, its features get a gradient of zero, and the checksum of its
row gradients is NaN, as for features that are not finite. The labels are copied to the host meanwhile, 8 bytes each;
the first call that finds them there reports the error.

Legend: B samples of all ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from geartrain.ams.programs.class_lifecycle import LiveClasses
from geartrain.ams.values.errors import InvalidIds
from geartrain.ams.values.specs import Ids
from geartrain.bridge.head.loss.checks import checked_class_ids
from geartrain.bridge.head.loss.sample_weights import BAD_WEIGHT
from geartrain.bridge.kernels.launch import is_capturing, runs_kernels
from geartrain.bridge.kernels.sample_terms import PreparedLabels, prepare_labels
from geartrain.bridge.placements.device_rows import DeviceRows
from geartrain.bridge.rows.transfers import Readback, upload


class DeviceLabels:
    """Labels of the last steps, until the host has checked them. Not thread-safe."""

    def __init__(self, ignore_index: int | None) -> None:
        self._ignored = ignore_index
        self._under_way: deque[tuple[Readback, int, LiveClasses]] = deque()
        self._captured: list[tuple[Tensor, LiveClasses]] = []
        """Labels that a CUDA graph reads, of the step being captured."""
        self._runs: tuple[LiveClasses, Tensor, Tensor] | None = None
        """Live classes, and on a device the starts of the runs of retired ones and the stop of the last run."""

    def settled(self, labels_B: Tensor, live_classes: LiveClasses, step: int, rows: DeviceRows) -> PreparedLabels:
        """Replace labels that do not count, so that all are of live classes; return them with each sample's count.

        A label that is ignored or wrong is replaced by one that counts; if none does, by any live class.
        """
        if is_capturing(labels_B.device):
            self._captured.append((labels_B, live_classes))
        else:
            self._under_way.append((Readback(labels_B), step, live_classes))
        if runs_kernels(labels_B.device) and live_classes.are_all:
            place = rows.first, rows.num_local, rows.link.world_size
            return prepare_labels(labels_B, live_classes.num_classes, self._ignored, *place)
        are_good_B = self._live(labels_B, live_classes)
        if self._ignored is None:
            counts_B = torch.where(are_good_B, 1.0, torch.nan)
        else:
            are_ignored_B = labels_B == self._ignored  # the ignored label may be a class
            are_good_B = are_good_B & ~are_ignored_B
            counts_B = torch.where(are_ignored_B, 0.0, torch.nan).masked_fill_(are_good_B, 1.0)
        if len(labels_B):
            any_live = int(live_classes.ids(np.zeros(1, np.int64))[0])
            stand_in = labels_B.where(are_good_B, any_live).amax()
            labels_B = labels_B.where(are_good_B, stand_in)
        divisor = are_good_B.sum(dtype=torch.float32).clamp_(min=1)
        return PreparedLabels(labels_B, counts_B, counts_B.sum(), divisor, divisor / rows.link.world_size, None)

    def _live(self, labels_B: Tensor, live_classes: LiveClasses) -> Tensor:
        are_ids_B = labels_B == labels_B.clamp(0, live_classes.num_classes - 1)
        if live_classes.are_all:
            return are_ids_B
        if self._runs is None or self._runs[0] is not live_classes or self._runs[1].device != labels_B.device:
            runs = live_classes.retired_runs
            stops = np.concatenate([[0], runs[:, 1]])
            starts = np.ascontiguousarray(runs[:, 0])
            self._runs = live_classes, upload(starts, labels_B.device), upload(stops, labels_B.device)
        _, starts_R, stops_R = self._runs
        return are_ids_B & (labels_B >= stops_R[torch.searchsorted(starts_R, labels_B, right=True)])

    def pop_captured(self) -> Callable[[int], None]:
        """Return a function to call after each replay of the captured step, with its number: it fetches the labels."""
        captured, self._captured = self._captured, []

        def check_later(step: int) -> None:
            self._under_way.extend((Readback(labels_B), step, live_classes) for labels_B, live_classes in captured)

        return check_later

    @property
    def has_bad(self) -> bool:
        """Whether labels that are here by now were wrong; earlier good ones are dropped."""
        while self._under_way and self._under_way[0][0].is_here:
            if self._error() is not None:
                return True
            self._under_way.popleft()
        return False

    def pop_error(self) -> InvalidIds:
        """Return the error of the first step with a bad label, for which it waits; some rank knows that there is
        one."""
        if (error := self.first_error()) is not None:
            self._under_way.popleft()
            return error
        return InvalidIds("another rank found a bad label in a step before; its error tells which")

    def first_error(self) -> InvalidIds | None:
        """Return what :meth:`pop_error` would, or None; waits for the labels, of which every rank has all."""
        while self._under_way:
            if (error := self._error()) is not None:
                return error
            self._under_way.popleft()
        return None

    def _error(self) -> InvalidIds | None:
        arrived, step, live_classes = self._under_way[0]
        labels: Ids = arrived.values().numpy()
        try:
            if len(wrong := np.flatnonzero(labels == BAD_WEIGHT)):
                raise InvalidIds(f"the weight at index {int(wrong[0])} is negative or not finite; give one >= 0")
            checked_class_ids(labels, live_classes.num_classes, "label", self._ignored)
            counted = labels if self._ignored is None else labels[labels != self._ignored]
            live_classes.require(counted, "label")
        except InvalidIds as exc:
            return InvalidIds(f"step {step}, which has changed no row, was given on its device: {exc}")
        return None
