"""The hosted models that Geartrain's shards are given, whoever starts them: ``ams`` itself knows none.

Whatever is named here is imported by every shard process: no torch.
"""

from __future__ import annotations

from geartrain.ams.programs import bag_pooling, class_head
from geartrain.ams.programs.hosted import HostedModels


def hosted_models() -> HostedModels:
    """The models of a shard, by the names that heads and embeddings ask for."""
    return {class_head.NAME: class_head.ClassHeadModel(), bag_pooling.NAME: bag_pooling.BagPoolingModel()}
