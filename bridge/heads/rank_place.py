"""Making the table of a head whose rows are on the ranks."""

from __future__ import annotations

import torch.distributed as dist

from geartrain.ams.errors import GeartrainError
from geartrain.ams.specs import DTypeName, Initializer, Normal, RowOptimizerSpec, TableSpec
from geartrain.bridge.heads.rank_link import RankLink
from geartrain.bridge.heads.rank_table import RankTable, require_supported


def open_rank_table(
    name: str,
    *,
    num_classes: int,
    dim: int,
    optimizer: RowOptimizerSpec,
    initializer: Initializer | None,
    seed: int,
    dtype: DTypeName,
    slot_dtype: DTypeName,
    process_group: dist.ProcessGroup | None,
    settings: dict[str, str],
) -> RankTable:
    """Make the table on every rank of the group (None: all; without torch.distributed this process alone).

    Raises InvalidArgument, and SpecMismatch on every rank unless all give equal fields and ``settings``. Three
    all-gathers between the hosts.
    """
    link = RankLink(process_group)
    try:
        spec = TableSpec(
            name=name,
            dim=dim,
            optimizer=optimizer,
            num_rows=num_classes,
            initializer=initializer if initializer is not None else Normal(std=0.01),
            seed=seed,
            dtype=dtype,
            slot_dtype=slot_dtype,
        )
        require_supported(spec)
    except GeartrainError as exc:
        link.require_equal({"error": str(exc)}, f"table {name!r}")
        raise
    link.require_equal({**spec.to_dict(), **settings}, f"table {name!r}")
    return RankTable(spec, link, link.device)
