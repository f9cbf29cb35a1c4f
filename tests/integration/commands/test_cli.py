"""The command line as a person or a script meets it: help, output, exit codes, one-line errors."""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import typer

from geartrain.ams.values.config import ClusterConfig
from geartrain.ams.values.errors import NonFinite, Unavailable
from geartrain.ams.values.rpc import version
from geartrain.cli import main as cli
from geartrain.cli.main import COMMANDS
from tests.support.command_line import typed

TIMEOUT_SECONDS = 60


def geartrain(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "geartrain", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        cwd=cwd,
        env={name: value for name, value in os.environ.items() if name != "COLUMNS"},  # readline adds it to pytest's
    )


@contextmanager
def role(*arguments: str, log: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """Run a role until the block ends; yields what its ready line says. Its log goes to ``log``."""
    process = subprocess.Popen(
        [sys.executable, "-m", "geartrain", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        yield json.loads(line)
        process.terminate()
        assert process.wait(TIMEOUT_SECONDS) == 0
        if log is not None:
            log.append(process.stderr.read())
    finally:
        process.kill()
        process.communicate()


def assert_one_line_error(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1, done.stderr
    for word in words:
        assert word in done.stderr


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS), ["config", "show"], ["config", "validate"]])
def test_every_command_explains_itself(command: list[str]) -> None:
    done = typed(*command, "--help")
    assert done.returncode == 0, done.stderr
    assert "Usage: " in done.stdout
    assert re.findall(r"<(?:bool|int|str|float|path)>|`", done.stdout) == []


def test_the_help_of_a_role_says_what_its_configuration_has_by_default() -> None:
    said = typed("slowgear", "--help").stdout
    assert "(20.0)" in said and "(sgd:0.01)" in said and "(127.0.0.1:7000)" in said


def test_help_lists_every_command() -> None:
    listed = geartrain("--help").stdout
    assert [name for name in COMMANDS if f" {name} " not in listed] == []


def test_the_help_has_no_line_breaks_but_those_of_the_terminal() -> None:
    root = typer.main.get_command(cli.build_app([]))
    groups = [group for group in root.commands.values() if hasattr(group, "commands")]  # type: ignore[attr-defined]
    commands = [root, *root.commands.values(), *(command for group in groups for command in group.commands.values())]  # type: ignore[attr-defined]
    assert [command.name for command in commands if "\n" in (command.help or "").replace("\n\n", "")] == []


def test_the_version_is_printed() -> None:
    assert geartrain("--version").stdout == f"geartrain {version()}\n"


@pytest.mark.parametrize("arguments", [["upp"], ["up", "--shard", "x"], ["status", "--nope"]])
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    assert typed(*arguments).returncode == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plan", "--dim", "8", "--classes", "ten"], "'--classes': 'ten' is wrong: it must be a valid integer"),
        (["predict", "run", "x.png", "--k", "0"], "'--k' / '-k': '0' is wrong: it must be greater than or equal to 1"),
        (["worker", "glyphs", "--steps", "0"], "'--steps': '0' is wrong: it must be greater than or equal to 1"),
        (["snapshot", "prune", "x", "--keep", "0"], "'--keep': '0' is wrong: it must be greater than or equal to 1"),
    ],
)
def test_a_wrong_number_is_named_with_its_option(arguments: list[str], said: str) -> None:
    done = typed(*arguments)
    assert done.returncode == 2
    assert said in " ".join(done.stderr.replace("\u2502", " ").split())


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--classes", "9", "--momentum", "--adam"], "--adam and --momentum"),
        (["--ids", "9", "--sgd", "--optimizer", "adam"], "--optimizer and --sgd"),
    ],
)
def test_a_plan_of_two_optimizers_is_refused(options: list[str], named: str) -> None:
    done = typed("plan", "--dim", "8", *options)
    assert (done.returncode, f"{named} each say the rows' optimizer" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["worker", "classify", "--data", "/nope"], "/nope is not there"),
        (["worker", "classify", "--data", ".", "--set", "held_out=3"], "3.0"),
        (["worker", "classify", "--data", str(Path(__file__).parent), "--set", "backbone=iresnet17"], "'iresnet17'"),
        (["worker", "classify", "--data", str(Path(__file__).parent), "--device", "quantum"], "'quantum'"),
        (["quickstart", "--small", "--out", "/proc/nope/small"], "the folder /proc/nope cannot be made"),
        (["worker", "glyphs", "--cache", __file__], __file__),
        (["predict", "/nope", "x.png"], "/nope"),
        (["worker", "classify", "--resume", "/nope"], "--overwrite"),
        (["worker", "glyphs", "--resume", "/nope", "--out", "/other"], "--out"),
        (["worker", "classify", "--resume", "/nope", "--out", "/other"], "--out"),
        (["worker", "glyphs", "--out", "/proc/nope"], "/proc/nope"),
        (["bench", "nope"], "'nope'"),
        (["config", "validate", "/nope"], "/nope"),
    ],
)
def test_bad_input_exits_with_2(arguments: list[str], named: str, tmp_path: Path) -> None:
    if arguments[0] == "worker" and not {"--resume", "--out"} & set(arguments):
        arguments = [*arguments, "--out", str(tmp_path / "run")]
    assert_one_line_error(typed(*arguments), 2, named)
    assert not [*tmp_path.iterdir()]


def test_what_may_not_be_written_is_a_usage_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise OSError(errno.EACCES, "Permission denied", "/full")

    monkeypatch.setattr(cli, "build_app", lambda _: fail)
    with pytest.raises(SystemExit) as exited:
        cli.main()
    assert exited.value.code == 2
    assert (
        capsys.readouterr().err
        == "error: /full: Permission denied; give a file or folder where you may read and write\n"
    )


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (NonFinite("/full"), "/full"),
        (Unavailable("/full"), "/full"),
        (OSError(errno.ENOSPC, "No space left on device", "/full"), "/full"),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device: free space"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", b"/run/x"), "/run/x: No such file"),
    ],
)
def test_what_fails_at_run_time_exits_with_1_and_one_line_whatever_it_knows(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(cli, "build_app", lambda _: fail)
    with pytest.raises(SystemExit) as exited:
        cli.main()
    assert exited.value.code == 1
    assert capsys.readouterr().err.startswith(f"error: {said}")


@pytest.mark.parametrize("name", ["scheduler", "server", "up"])
def test_a_role_that_others_could_reach_refuses_to_start(name: str) -> None:
    flag = "--scheduler-listen" if name == "up" else "--listen"
    assert_one_line_error(typed(name, flag, "0.0.0.0:0"), 2, "'0.0.0.0:0'", "--insecure")


def test_a_role_that_others_can_reach_starts_with_insecure_and_warns() -> None:
    said: list[str] = []
    with role("scheduler", "--listen", "0.0.0.0:0", "--insecure", log=said) as facts:
        assert facts["ready"] == "scheduler"
    assert "WARNING" in said[0]
    assert "without encryption or authentication" in said[0]


def test_single_roles_make_a_cluster() -> None:
    with role("scheduler", "--listen=127.0.0.1:0", "--num-shards=1") as scheduler:
        address = scheduler["address"]
        waiting = geartrain("status", "--scheduler", address, "--json")
        assert waiting.returncode == 1
        assert [shard["state"] for shard in json.loads(waiting.stdout)["shards"]] == ["missing"]
        with role("server", "--scheduler", address) as server:
            ready = typed("status", "--scheduler", address, "--json")
            assert ready.returncode == 0
            (shard,) = json.loads(ready.stdout)["shards"]
            assert ([shard["address"]], shard["pid"]) == (server["addresses"], server["pid"])
            assert "1 of 1 shard up · insecure" in typed("status", "--scheduler", address).stdout
            for served in (address, *server["addresses"]):
                health = typed("health", served, "--json")
                assert (health.returncode, json.loads(health.stdout)["serving"]) == (0, True)


def test_a_server_says_that_it_waits_for_the_scheduler() -> None:
    address = "127.0.0.1:1"  # nobody listens there
    command = [sys.executable, "-m", "geartrain", "server", "--scheduler", address, "--listen=127.0.0.1:0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        said = next(line for line in process.stderr if "WARNING" in line)
    finally:
        process.kill()
        process.communicate()
    assert f"scheduler at {address} does not answer: connection refused; retrying for up to 60 s" in said


def test_the_status_of_a_scheduler_that_is_not_there_is_a_one_line_error() -> None:
    done = typed("status", "--scheduler", "127.0.0.1:1")
    assert_one_line_error(done, 1, "scheduler at 127.0.0.1:1", "connection refused;", "'geartrain up'")
    assert "UNAVAILABLE" not in done.stderr and "ipv4" not in done.stderr


def test_a_graph_service_that_is_not_there_is_not_waited_for_as_one_that_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GEARTRAIN_CLIENT__CONNECT_TIMEOUT_SECONDS", "0.3")
    done = geartrain("graph", "list", "--graph", "127.0.0.1:1")
    assert done.returncode == 1
    assert "trying again for up to 0.3 s" in done.stderr
    assert "error: graph service at 127.0.0.1:1 does not answer: connection refused (for 0." in done.stderr


@pytest.mark.parametrize("name", ["scheduler", "server"])
def test_a_port_in_use_is_a_one_line_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        done = geartrain(name, "--listen", f"127.0.0.1:{port}")
    assert_one_line_error(done, 2, f"in use by process {os.getpid()} (", "--listen 127.0.0.1:0 picks a free port")
    assert "Failed to bind" not in done.stderr


def test_an_address_of_another_machine_is_not_said_to_be_in_use() -> None:
    done = typed("scheduler", "--listen", "192.0.2.1:7000", "--insecure")
    assert done.returncode == 2
    assert "cannot assign requested address" in done.stderr


def test_nobody_is_healthy_where_nobody_listens_and_what_is_no_address_is_a_usage_error() -> None:
    done = typed("health", "127.0.0.1:1")
    assert (done.returncode, done.stdout) == (1, "127.0.0.1:1: not serving\n")
    assert_one_line_error(typed("health", "nowhere"), 2, "'nowhere'")


def test_a_shown_configuration_is_a_valid_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GEARTRAIN_SECURITY__FOLDER", raising=False)
    path = tmp_path / "cluster.yaml"
    path.write_text(typed("config", "show").stdout, encoding="utf-8")
    done = typed("config", "validate", str(path), "--json")
    assert json.loads(done.stdout) == {"valid": True, "num_shards": 1, "num_servers": 1}
    assert typed("config", "validate", str(path)).stdout == f"{path}: valid, 1 shard on 1 server\n"
    assert json.loads(typed("config", "show", "-f", str(path), "--json").stdout) == ClusterConfig().model_dump(
        mode="json"
    )


def test_a_wrong_file_is_refused_with_its_line_and_a_suggestion(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("scheduler:\n  lissen: 127.0.0.1:7000\n", encoding="utf-8")
    for command in (["config", "validate", str(path)], ["up", "-f", str(path)], ["scheduler", "-f", str(path)]):
        assert_one_line_error(typed(*command), 2, f"{path}:2", "'lissen'", "'listen'")


def test_an_unknown_log_level_lists_the_known_ones() -> None:
    assert_one_line_error(typed("scheduler", "--log-level", "loud"), 2, "'loud'", "debug, info, warning, error")
