"""What becomes of the rows of a reply that came in a message."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from geartrain.ams.pb.v1 import shard_pb2
from geartrain.ams.rpc.codec import framing
from geartrain.ams.values.errors import ProtocolError
from geartrain.ams.values.interrupts import held
from geartrain.ams.values.shard_messages import Pull, Pulled, Reply


class Unpack:
    """Writes the rows of one reply where the pull wants them."""

    def __init__(self, pull: Pull, start: int, end: int) -> None:
        self._pull, self._start, self._end = pull, start, end

    def __call__(self, data: bytes) -> Reply:
        reply, raw = framing.decode_framed(data, shard_pb2.PullReply)
        pull, start, end = self._pull, self._start, self._end
        with held(pull.buffer_lease):
            rows = framing.rows_from(raw.get(15), end - start, pull.out.shape[1], pull.out.dtype)
            present = self._present(raw.get(14))
            where: Any = slice(start, end) if pull.positions is None else pull.positions[start:end]
            pull.out[where] = rows
            if pull.present is not None:
                pull.present[where] = present
        return Pulled(writes=reply.writes)

    def _present(self, raw: memoryview | None) -> npt.NDArray[np.bool_] | None:
        num_ids = self._end - self._start
        if self._pull.present is None:
            return None
        if raw is None or len(raw) != num_ids:
            raise ProtocolError(f"the shard did not say which of {num_ids} rows exist")
        return np.frombuffer(raw, np.bool_)
