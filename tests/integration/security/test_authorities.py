"""The key of the authority: kept by a backup, and replaced under a cluster that trains."""

from __future__ import annotations

import shutil
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import geartrain as gt
from geartrain.ams.client.jobs.rendezvous import RendezvousValues
from geartrain.ams.rpc.credentials import CA_FILE
from geartrain.ams.values.config import CLIENT, FOLDER_VARIABLE, ClientConfig, identify, identity
from geartrain.ams.values.errors import AccessDenied, SchedulerUnavailable
from tests.integration.conftest import QUICK
from tests.support.command_line import invoke, typed
from tests.support.role_process import RoleProcess

ONCE = ClientConfig(recovery_timeout_seconds=0.0)
ROLES = ("scheduler", "server", "client")
LOOK_SECONDS = 1.5
"""Processes look at their files each second."""


def done(*arguments: str) -> str:
    told = typed("certs", *arguments)
    assert told.returncode == 0, told.stderr
    return told.stdout


def test_a_lost_key_comes_back_from_its_backup(tmp_path: Path) -> None:
    folder, backup, passphrase = tmp_path / "ca", tmp_path / "copies" / "ca.p12", tmp_path / "passphrase"
    passphrase.write_text("correct horse battery\n")
    done("init", str(folder))
    key = (folder / "ca.key").read_bytes()
    told = done("backup", str(folder), str(backup), f"--passphrase-file={passphrase}")
    assert "correct horse" not in told and b"PRIVATE KEY" not in backup.read_bytes()
    assert backup.stat().st_mode & 0o777 == 0o600
    (folder / "ca.key").unlink()
    done("restore", str(backup), str(folder), f"--passphrase-file={passphrase}")
    assert (folder / "ca.key").read_bytes() == key and (folder / "ca.key").stat().st_mode & 0o777 == 0o600
    assert (folder / CA_FILE).read_text().count("BEGIN CERTIFICATE") == 1
    done("renew", str(folder), "--all")
    elsewhere = tmp_path / "elsewhere"
    asked = invoke("certs", "restore", str(backup), str(elsewhere), answer="correct horse battery\n")
    assert asked.exit_code == 0 and "correct horse" not in asked.output
    done("issue", str(elsewhere), "client")
    assert (elsewhere / CA_FILE).read_bytes() == (folder / CA_FILE).read_bytes()


def test_what_is_wrong_with_a_backup_is_named(tmp_path: Path) -> None:
    folder, backup, passphrase, short = (tmp_path / name for name in ("ca", "ca.p12", "passphrase", "short"))
    passphrase.write_text("correct horse battery")
    short.write_text("horse")
    done("init", str(folder))
    done("backup", str(folder), str(backup), f"--passphrase-file={passphrase}")
    other, damaged = tmp_path / "other", tmp_path / "damaged"
    other.write_text("correct horse batterY")
    damaged.write_bytes(backup.read_bytes()[:-1] + b"x")
    new = str(tmp_path / "new")
    for arguments, said in (
        (("backup", str(folder), str(tmp_path / "b"), f"--passphrase-file={short}"), "has 5 characters; it must have"),
        (("backup", str(folder), str(backup), f"--passphrase-file={passphrase}"), "is there already"),
        (("backup", new, str(tmp_path / "b"), f"--passphrase-file={passphrase}"), "no authority issues"),
        (("backup", str(folder), str(tmp_path / "b"), f"--passphrase-file={tmp_path / 'no'}"), "cannot read the pass"),
        (("restore", str(backup), str(folder), f"--passphrase-file={passphrase}"), "ca.key is there already"),
        (("restore", str(backup), new, f"--passphrase-file={other}"), "has another passphrase"),
        (("restore", str(damaged), new, f"--passphrase-file={passphrase}"), "is damaged"),
        (("restore", str(tmp_path / "no"), new, f"--passphrase-file={passphrase}"), "cannot read"),
    ):
        told = typed("certs", *arguments)
        assert told.returncode == 2 and said in told.stderr, told.stderr
    assert not Path(new).exists()


def test_a_lost_authority_is_replaced_under_a_training_that_loses_no_step(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    done("init", str(old), "--cluster=search")
    hosts = {role: tmp_path / role for role in ROLES}
    for role, host in hosts.items():
        host.mkdir()
        for name in (CA_FILE, f"{role}.pem"):
            shutil.copy(old / name, host / name)
    done("issue", str(tmp_path / "thief"), "client", f"--ca={old}")
    (old / "ca.key").unlink()

    def copied(name: str | None) -> None:
        """As an administrator does, with all machines at work; then they have looked."""
        for role, host in hosts.items():
            part = host / "part"
            shutil.copy(old / (name or f"{role}.pem"), part)
            part.replace(host / (name or f"{role}.pem"))
        time.sleep(LOOK_SECONDS)

    def role(kind: str, *arguments: str) -> RoleProcess:
        return RoleProcess(kind, "--listen=127.0.0.1:0", *arguments, **{FOLDER_VARIABLE: str(hosts[kind])})

    ended = threading.Event()
    with role("scheduler", "--num-shards=1") as scheduler, role("server", f"--scheduler={scheduler.address}"):
        with ExitStack() as stack:
            identify(str(hosts["client"]))
            cluster = stack.enter_context(gt.connect(scheduler.address, config=QUICK))
            table = cluster.create_table("rows", dim=4, optimizer=gt.SGD(1.0))
            before, steps = table.pull([7]), 0
            failures: list[Exception] = []
            values = RendezvousValues(scheduler.address, "job", ONCE)
            identify(str(tmp_path / "thief"))
            stolen: list[Any] = [RendezvousValues(scheduler.address, "job", ONCE)]
            stolen[0].read(["key"])
            for shared_memory in (True, False):
                config = QUICK.model_copy(update={"shared_memory": shared_memory})
                thief = stack.enter_context(gt.connect(scheduler.address, config=config))
                thief.table("rows").pull([7])
                stolen.append(thief.table("rows"))
            identify(str(hosts["client"]))

            def train() -> None:
                nonlocal steps
                try:
                    while not ended.is_set():
                        table.push([7], np.ones((1, 4), np.float32))
                        values.write("steps", add=1)
                        steps += 1
                except Exception as exc:
                    failures.append(exc)

            training = threading.Thread(target=train)
            training.start()
            try:
                done("init", str(new), "--cluster=search")
                for kind in ROLES:
                    done("issue", str(old), kind, f"--ca={new}")
                at = [steps]
                copied(CA_FILE)  # both are believed
                at.append(steps)
                copied(None)  # certificates of the new one
                shutil.copy(new / CA_FILE, old / CA_FILE)
                at.append(steps)
                copied(CA_FILE)  # the new one alone
                at.append(steps)
                time.sleep(LOOK_SECONDS)
            finally:
                ended.set()
                training.join()
            assert not failures, failures
            assert sorted(set(at)) == at  # steps were done in each part
            assert values.read(["steps"])[0].value == b"%d" % steps
            values.close()
            assert np.allclose(table.pull([7]), before - steps)
            # Who connected while the lost authority was believed is not served on.
            for rows in stolen[1:]:
                with pytest.raises(AccessDenied):
                    rows.pull([7])
            with pytest.raises(AccessDenied):
                stolen[0].read(["key"])
            stolen[0].close()
        # Certificates of the lost authority are no longer trusted.
        with (tmp_path / "thief" / CA_FILE).open("ab") as file:  # who believes the new one itself
            file.write((new / CA_FILE).read_bytes())
        identify(str(tmp_path / "thief"))
        stranger = RendezvousValues(scheduler.address, "job", ONCE)
        with pytest.raises(SchedulerUnavailable):
            stranger.read(["key"])
        stranger.close()


def test_a_folder_may_be_named_by_the_home_of_its_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(FOLDER_VARIABLE, "~/certificates")
    assert identity("10.0.0.1:7000") == (str(tmp_path / "certificates"), CLIENT)
