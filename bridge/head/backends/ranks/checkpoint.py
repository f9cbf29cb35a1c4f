"""Class rows on ranks in ``torch.distributed.checkpoint``: DTensors over the ranks, in place.

Legend: C classes, L of them on this rank, D width, S numbers of a row's slots, k neighbours of a class; K scales of a
row, or of its slots.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from geartrain.ams.tables.row_table import TableSteps
from geartrain.ams.values.errors import InvalidArgument, SpecMismatch
from geartrain.ams.values.specs import TableSpec
from geartrain.bridge.rows.serialization import RowsOfRank

if TYPE_CHECKING:
    from geartrain.bridge.head.backends.ranks.update import RankHead


class ShardedRows:
    """Rows, slots and the state of one head, as ``torch.distributed.checkpoint`` takes them (a ``Stateful``).

    ``rows`` [C, D], ``slots`` [C, S], ``steps`` [C], ``row_scales`` [C, K] and ``slot_scales`` [C, K], those that the
    table has, are DTensors over the ranks, and plain tensors with one rank, in the memory of the table: nothing is
    copied, and a load writes into the rows. ``head`` is JSON. With KNN softmax so is ``graph``, and ``graph_lists``
    [C, k], a tensor of the same kind, holds the lists of its graph: −1 where there is none. torch refuses to load them
    with another ``k`` than they were saved with.
    """

    def __init__(self, backend: RankHead, head: nn.Module) -> None:
        self._backend = backend
        self._head = head

    def state_dict(self) -> dict[str, Any]:
        """Return the tensors that are saved, or that a load fills."""
        table = self._backend.table
        tensors = {"rows": table.rows_LD, "slots": table.slots_LS, "steps": table.steps_L}
        tensors |= {"row_scales": table.row_scales_LK, "slot_scales": table.slot_scales_LK}
        steps = None if table.steps is None else table.steps.state._asdict()
        graph = self._backend.select.graph_state()
        lists = None if graph is None else graph.pop("lists")
        tensors["graph_lists"] = lists.rows if isinstance(lists, RowsOfRank) else lists
        saved = {"spec": table.spec.to_dict(), "steps": steps, "state": self._head.get_extra_state()}
        return {
            **{name: self._sharded(tensor) for name, tensor in tensors.items() if tensor is not None},
            "head": json.dumps(saved),
            "graph": None if graph is None else json.dumps(graph),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from rows that a load has filled.

        Raises SpecMismatch if they were saved with other settings: then all rows have their initial values.
        """
        backend, table = self._backend, self._backend.table
        saved = json.loads(state["head"])
        if other := TableSpec.from_dict(saved["spec"]).fixed_unlike(table.spec):
            table.write_initial_values()
            raise SpecMismatch(
                f"table {table.spec.name!r} of the checkpoint differs from this head's: {other}. "
                "Make the head with the saved settings; its rows have their initial values now"
            )
        if table.steps is not None:
            table.steps.adopt(TableSteps(**saved["steps"]))
        backend.rows_are_of(int(saved["state"]["step"]))
        backend.require_rows(saved["state"]["table_rows"])
        if state["graph"] is not None:
            graph = {**json.loads(state["graph"]), "lists": state["graph_lists"]}
            backend.select.load_graph(graph, lambda lists, _: lists.to_local() if hasattr(lists, "to_local") else lists)
        self._head.set_extra_state(saved["state"])

    def _sharded(self, local: Tensor) -> Tensor:
        """Return the tensor [C, …] of which this rank holds ``local`` [L, …]."""
        table = self._backend.table
        if table.link.world_size == 1:
            return local
        # Few programs use it, and its import takes long.
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor, Shard

        group = self._backend.settings.config.process_group or dist.group.WORLD
        if group is None:
            raise InvalidArgument("torch.distributed was ended; save and load before destroy_process_group()")
        mesh = DeviceMesh.from_group(group, local.device.type)
        shape = torch.Size((table.spec.num_rows or 0, *local.shape[1:]))
        sharded: Tensor = DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=shape, stride=local.stride()
        )
        return sharded
