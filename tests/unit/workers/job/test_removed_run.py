"""A run folder that is removed while a run trains there."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from geartrain.workers.job import job
from geartrain.workers.job.trainer import Trainer


@pytest.mark.parametrize(
    ("there", "file", "said"),
    [(False, "events/file", "was removed while the run trained there"), (True, "events/file", ""), (False, "../x", "")],
)
def test_the_folder_is_named_if_it_is_gone(
    there: bool, file: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"

    def fail(*_: object) -> None:
        if there:
            out.mkdir()
        path = Path(os.path.normpath(out / file))
        raise FileNotFoundError(errno.ENOENT, "No such file", os.fsencode(path))

    monkeypatch.setattr(job, "_run_once", fail)
    options: Any = SimpleNamespace(out=out, resume=False, overwrite=False)
    with pytest.raises(FileNotFoundError) as caught:
        job._run_to_the_end(Trainer, options, Console(quiet=True), 0.0, None)
    assert caught.value.strerror == "No such file" + (f": {out} {said}; start it again" if said else "")
