"""Networks for the vectors that :class:`geartrain.EmbeddingGroup` returns, each an ordinary ``nn.Module``."""

from __future__ import annotations

from geartrain.bridge.models.activations import Dice
from geartrain.bridge.models.click_model import ClickModel
from geartrain.bridge.models.crossmedia import CrossMedia
from geartrain.bridge.models.deepfm import DeepFM
from geartrain.bridge.models.dien import AUGRU, DIEN
from geartrain.bridge.models.din import DIN
from geartrain.bridge.models.dssm import DSSM
from geartrain.bridge.models.wide_deep import WideDeep

__all__ = ["AUGRU", "DIEN", "DIN", "DSSM", "ClickModel", "CrossMedia", "DeepFM", "Dice", "WideDeep"]
