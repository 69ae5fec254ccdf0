"""The command line: one clear line and an exit code for whatever goes wrong, never a traceback."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import cluster.launch
from cluster.launch import node_ids, prepare
from cluster.run_file import RunFile, RunRecord, start_ticks
from contracts.config import ClusterConfig, Config, EngineConfig
from contracts.errors import StartupError
from contracts.seams import SEAMS
from contracts.workers import Role, WorkerInfo, WorkerLoad
from pdserve import cli
from pdserve.commands.up import serve
from shared_state.backends import memory
from shared_state.records import encode

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path / "cache"))

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["pdserve", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        out, err = capsys.readouterr()
        return int(caught.value.code or 0), out, err

    return call


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        (["up", "--set", "kv.block_sise=8"], 2, "unknown configuration key 'kv.block_sise'; did you mean"),
        (["up", "--set", "nonsense"], 2, "--set takes key=value, not 'nonsense'"),
        (["up", "--mode", "both"], 2, "cluster.mode must be one of disaggregated, aggregated, not 'both'"),
        (["up", "--kv-memory", "much"], 2, "kv.memory must be a size such as 512MiB or 2GiB, not 'much'"),
        (["up", "--prefill", "0"], 2, "cluster.prefill must be at least 1, not 0"),
        (["up", "--http-port", "99999"], 2, "router.http_port must be a port (0 to 65535), not 99999"),
        (["up", "--config", "/nowhere.toml"], 2, "cannot read the configuration file /nowhere.toml: No such file"),
        (["status"], 1, "nothing runs in namespace 'pdserve'; start it with `pdserve up`"),
        (["status", "--set", "cluster.namespace=../x"], 2, "cluster.namespace takes letters, digits, "),
    ],
)
def test_errors_are_one_line(run: Run, arguments: list[str], code: int, line: str) -> None:
    got, out, err = run(*arguments)
    assert (got, out) == (code, "")
    assert err.startswith(f"pdserve: {line}")
    assert err.count("\n") == 1


def test_no_such_model_is_one_line_and_leaves_nothing(run: Run, tmp_path: Path) -> None:
    code, _, err = run("up", "--model", "smollm3-135m")
    assert code == 1
    assert err.startswith("pdserve: no model 'smollm3-135m'")
    assert err.count("\n") == 1
    assert not list((tmp_path / "cache" / "run").iterdir())


def test_flags_win_over_settings_over_environment(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Config] = []

    async def launch(config: Config, say: Callable[[str], None]) -> None:
        seen.append(config)
        raise StartupError("enough seen")

    monkeypatch.setattr(cluster.launch, "launch", launch)
    monkeypatch.setenv("PDSERVE_KV_BLOCKS", "1")
    monkeypatch.setenv("PDSERVE_KV_GROWTH_TOKENS", "2")
    settings = ["--set", "kv.blocks=3", "--set", "kv.block_size=4"]
    assert run("up", *settings, "--block-size", "5", "--served-model-name", "m") == (1, "", "pdserve: enough seen\n")
    assert (seen[0].kv.growth_tokens, seen[0].kv.blocks, seen[0].kv.block_size) == (2, 3, 5)
    assert seen[0].model.served_name == "m"


def test_a_wrong_option_is_named(run: Run) -> None:
    code, _, err = run("up", "--no-such-option")
    assert code == 2
    assert "--no-such-option" in err
    assert "Traceback" not in err


def test_plugs_lists_every_seam(run: Run) -> None:
    code, out, _ = run("plugs")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == list(SEAMS)


def test_status_while_starting(run: Run, tmp_path: Path) -> None:
    pid = os.getpid()
    RunFile(tmp_path / "cache", "pdserve").claim(RunRecord(pid, start_ticks(pid) or 0, "pdserve", "/nowhere"))
    assert run("status") == (1, "", "pdserve: the cluster in namespace 'pdserve' is still starting\n")


def test_status_shows_who_is_there_and_how_loaded(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = os.getpid()
    record = RunRecord(pid, start_ticks(pid) or 0, "pdserve", "/nowhere", redis_url="redis://here")
    RunFile(tmp_path / "cache", "pdserve").claim(record)
    store = memory.create()

    async def fill() -> None:
        for role in (Role.DECODE, Role.ROUTER):
            await store.put(
                f"pdserve:pdserve:workers:{role.value}", encode(WorkerInfo(role.value, role, "a:1", 2, 3)), 9
            )
        await store.put("pdserve:pdserve:load:decode", encode(WorkerLoad(5, 6, 7, running=8, waiting=9)), 9)

    asyncio.run(fill())
    monkeypatch.setattr("shared_state.backends.redis.create", {"redis://here": store}.__getitem__)
    found = json.loads(run("status", "--json")[1])
    assert [(worker["id"], worker["role"], worker["pid"]) for worker in found["workers"]] == [
        ("decode", "decode", 3),
        ("router", "router", 3),
    ]
    assert found["loads"] == {"decode": {"running": 8, "waiting": 9, "free_blocks": 5}}


def test_down_ends_the_process_and_waits(run: Run, tmp_path: Path) -> None:
    assert run("down") == (0, "nothing runs in namespace 'pdserve'\n", "")
    left = tmp_path / "pdserve-left"
    left.mkdir()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        record = RunRecord(process.pid, start_ticks(process.pid) or 0, "pdserve", str(left))
        RunFile(tmp_path / "cache", "pdserve").claim(record)
        assert run("down") == (0, "stopped\n", "")
        assert process.wait() == -signal.SIGTERM
    assert not left.exists()


async def test_a_signal_during_the_launch_cancels_it(monkeypatch: pytest.MonkeyPatch) -> None:
    torn_down = asyncio.Event()

    async def launch(config: Config, say: Callable[[str], None]) -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()
        finally:
            torn_down.set()

    monkeypatch.setattr(cluster.launch, "launch", launch)
    await serve(Config())
    assert torn_down.is_set()


@pytest.mark.parametrize("second", [False, True])
async def test_a_second_signal_ends_the_drain(monkeypatch: pytest.MonkeyPatch, second: bool) -> None:
    events: list[str] = []

    class Cluster:
        async def drain(self, grace: float) -> None:
            events.append("drain")
            if second:
                os.kill(os.getpid(), signal.SIGINT)
                await asyncio.Event().wait()
            events.append("drained")

        async def close(self) -> None:
            events.append("closed")

    async def launch(config: Config, say: Callable[[str], None]) -> Cluster:
        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGINT)
        return Cluster()

    monkeypatch.setattr(cluster.launch, "launch", launch)
    await serve(Config())
    assert events == (["drain", "closed"] if second else ["drain", "drained", "closed"])


def test_what_every_node_is_told() -> None:
    prepared = prepare(Config(), "the-model", "unix:///s")
    assert prepared.cluster.redis_url == "unix:///s"
    assert prepared.model.served_name == "the-model"
    assert prepared.engine.threads >= 1
    assert len(prepared.cluster.secret) == len(prepared.cluster.hash_key) == 64
    assert prepared.cluster.secret != prepared.cluster.hash_key
    assert "secret" not in json.dumps(repr(prepared))
    given = Config(cluster=ClusterConfig(secret="s", hash_key="k", redis_url="u"), engine=EngineConfig(threads=3))
    kept = prepare(given, "m")
    assert (kept.cluster, kept.engine) == (given.cluster, given.engine)


def test_an_aggregated_cluster_has_no_prefill_workers() -> None:
    names = [name for _, name in node_ids(Config(cluster=ClusterConfig(prefill=2, decode=2, routers=1)))]
    assert names == ["prefill-0", "prefill-1", "decode-0", "decode-1", "router-0"]
    names = [name for _, name in node_ids(Config(cluster=ClusterConfig(mode="aggregated", prefill=2, decode=1)))]
    assert names == ["decode-0", "router-0"]
