"""Registry of the hosted models of Geartrain's shards; the rest of ``ams`` knows none.

Every shard process imports the modules named here: no torch.
"""

from __future__ import annotations

from geartrain.ams.programs import bag_pooling, class_head
from geartrain.ams.programs.hosted import HostedModels


def hosted_models() -> HostedModels:
    """Return the models of a shard, by their names in requests of heads and embeddings."""
    return {class_head.NAME: class_head.ClassHeadModel(), bag_pooling.NAME: bag_pooling.BagPoolingModel()}
