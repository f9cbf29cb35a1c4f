"""Networks over the vectors that :class:`geartrain.EmbeddingGroup` returns, each an ordinary ``nn.Module``."""

from __future__ import annotations

from geartrain.bridge.models.deepfm import DeepFM
from geartrain.bridge.models.wide_deep import WideDeep

__all__ = ["DeepFM", "WideDeep"]
