"""Which rows a client has written, as those are told who keep rows that they have read."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import geartrain as gt
from geartrain.ams.client.rows.write_log import WriteLog
from geartrain.ams.values.errors import GeartrainError
from geartrain.ams.values.specs import Ids

ONES = np.ones((2, 3), np.float32)


def ids(*values: int) -> Ids:
    return np.array(values, np.int64)


def test_every_write_of_a_client_is_told_of_from_before_it_until_it_is_forgotten() -> None:
    with gt.local() as cluster:
        table, other = (cluster.create_table(name, dim=3, optimizer=gt.SGD(1.0)) for name in ("t", "u"))
        table.push(ids(1, 2), ONES)  # nobody reads
        reader = table.write_log.reader()
        mark = reader.mark()
        assert reader.touched(mark) == {}
        given = ids(3, 3)
        table.push(given, ONES)
        given[:] = 9  # the caller's again
        table.assign(ids(4, 5), ONES)
        other.push_async(ids(6, 7), ONES).result()
        again = cluster.table("t").prepare_push(ids(8, 9), ONES)
        assert set(reader.touched(mark)) == {"t", "u"}
        again.send()
        told = {name: [own.tolist() for own in each] for name, each in reader.touched(mark).items()}
        assert told == {"t": [[3, 3], [4, 5], [8, 9]], "u": [[6, 7]]}
        assert [own.tolist() for own in reader.touched(mark, missing=1)["t"]] == [[3, 3], [4, 5]]
        assert reader.touched(mark, missing=3) == {}
        later = reader.mark()
        assert reader.touched(later) == {}
        reader.forget(later)
        assert set(reader.touched(mark)) == {"t", "u"}  # rows that were read before are asked about still
        reader.forget(mark)
        assert reader.touched(mark) == {}


def test_a_write_that_is_not_over_counts_for_who_reads_after_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    with gt.local() as cluster:
        table = cluster.create_table("t", dim=3, optimizer=gt.SGD(1.0))
        reader = table.write_log.reader()
        writes = [table.prepare_push(ids(n, n + 1), ONES) for n in (1, 3, 5)]
        for write in writes:
            write.announce()
        writes[1].send()
        marks = [reader.mark()]
        assert [own[0] for own in reader.touched(marks[0])["t"]] == [1, 3, 5]
        writes[0].abandon()
        marks.append(reader.mark())
        assert [own[0] for own in reader.touched(marks[1])["t"]] == [5]
        del write, writes[2:]  # nobody can send it any more
        gc.collect()
        assert reader.touched(reader.mark()) == {}

        class Broken(GeartrainError):
            pass

        def broken(*_: object) -> None:
            raise Broken

        failing = table.prepare_push(ids(7, 8), ONES)
        with monkeypatch.context() as patch:
            patch.setattr(failing._rows, "write", broken)
            with pytest.raises(Broken):
                failing.send_with([])
        mark = reader.mark()
        assert [own[0] for own in reader.touched(mark)["t"]] == [7]
        failing.send()
        assert reader.touched(reader.mark()) == {}


def test_whoever_is_gone_costs_nothing() -> None:
    log = WriteLog()
    reader = log.reader()
    assert log.start("t", ids(1)) == 0
    del reader
    assert log.start("t", ids(1)) is not None  # that is when it is noticed
    assert log.start("t", ids(1)) is None
