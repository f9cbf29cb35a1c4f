"""Read-only embeddings from an export, without a cluster: for serving a model that is still trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from geartrain.ams.client.snapshots.follower import FollowedTables
from geartrain.ams.values.errors import InvalidArgument, SpecMismatch
from geartrain.ams.values.text import quoted
from geartrain.bridge.embedding.field import Field
from geartrain.bridge.embedding.ids import batch_ids, ids_of_batch
from geartrain.bridge.embedding.vectors import feature_ids, merged_ids, require_no_max_weights, shaped, weighted
from geartrain.bridge.rows.eager import runs_eagerly
from geartrain.bridge.rows.transfers import upload


class GroupFollower(nn.Module):
    """A read-only :class:`~geartrain.bridge.embedding.group.EmbeddingGroup` over an export of its tables.

        cluster.export("ctr/*", "serving/ctr")                          # or geartrain export 'ctr/*' serving/ctr
        fields = GroupFollower("serving/ctr", "ctr", [gt.Field("user"), gt.Field("item", pooling="mean")])
        vectors = fields(batch)                                         # as the group's in torch.no_grad()
        fields.refresh()                                                # now and then

    All tables are of one version, a consistent cut of the cluster. It gives no gradients.
    """

    def __init__(self, root: str | Path, name: str, fields: Sequence[Field]) -> None:
        """Read the newest version in the folder or URL ``root``.

        ``name`` and ``fields`` are those of the group (``group.fields``), whose dims may be left out. Raises
        InvalidArgument, SpecMismatch if a field and its table differ in dim, TableNotFound, and as
        :class:`.TableFollower`.
        """
        super().__init__()
        self.name = name
        self.fields = tuple(fields)
        for item in self.fields:
            if not isinstance(item, Field):
                raise InvalidArgument(f"a field of {name!r} is {quoted(item)}; it must be a gt.Field('user', dim=16)")
        if not self.fields:
            raise InvalidArgument(f"{name!r} needs at least one field: [gt.Field('user')]")
        self._tables = list(dict.fromkeys(f"{name}/{field.table_name}" for field in self.fields))
        self._followed = FollowedTables(root, self._tables)
        for item in self.fields:
            dim = self._followed.specs[f"{name}/{item.table_name}"].dim
            if item.dim not in (None, dim):
                raise SpecMismatch(f"field {item.name!r} has dim {item.dim}, its table in {root} {dim}; leave it out")
        self.register_buffer("_place", torch.empty(0), persistent=False)  # its device is that of the vectors

    @property
    def version(self) -> int:
        """Number of the version of the rows."""
        return self._followed.version

    @property
    def created(self) -> float:
        """Unix time, in seconds, at which that version was written."""
        return self._followed.created

    def refresh(self) -> int | None:
        """Switch to the newest version, as :meth:`.TableFollower.refresh`; any thread may call it."""
        return self._followed.refresh()

    @runs_eagerly
    def forward(self, batch: Any) -> dict[str, Tensor]:
        """Look the ids of a batch up. Batch, vectors and errors are those of the group."""
        given = ids_of_batch(batch, [field.name for field in self.fields], batch_ids)
        features = [
            feature_ids(self._tables.index(f"{self.name}/{field.table_name}"), field, ids)
            for field, ids in zip(self.fields, given, strict=True)
        ]
        for field, ids in zip(self.fields, given, strict=True):
            require_no_max_weights(field, ids)
        num_rows = [self._followed.specs[table].num_rows for table in self._tables]
        lookup = merged_ids(self.fields, features, num_rows)
        pulled = self._followed.pull_together(dict(zip(self._tables, lookup.ids, strict=True)))
        out = lookup.pool([pulled[table] for table in self._tables], keep_maxima=False)
        device = cast("Tensor", self._place).device
        return {
            field.name: shaped(field, ids, weighted(field, ids, upload(vectors, device)))
            for field, ids, vectors in zip(self.fields, given, out, strict=True)
        }

    def extra_repr(self) -> str:
        """Return the fields, for print()."""
        lines = [f"{field.name}: {field.pooling}" for field in self.fields]
        return "\n".join([f"{self.name!r}, version {self.version} of {str(self._followed.root)!r}", *lines])
