"""How a real cluster ends: asked from another shell, by Ctrl-C once and twice, by SIGTERM, killed: nothing is left."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.processes import descendants, ended, kill_all, kill_and_wait
from tests.helpers.real_cluster import Shell, free_ports, shell, up
from tests.helpers.streams import streams

pytestmark = pytest.mark.cluster

SMALL = ("--set", "kv.blocks=512", "--threads", "1", "--served-model-name", "noise")
DRAINING = "stopping: up to 5 s for running requests; Ctrl-C again stops at once\n"


def body(tokens: int) -> dict[str, Any]:
    return {"model": "noise", "prompt": [9, 10, 11], "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def here() -> Iterator[Shell]:
    with shell() as made:
        yield made


async def test_down_from_another_shell(here: Shell, noise_llama: Path) -> None:
    with up(here, "--mode", "aggregated", *SMALL, model=str(noise_llama)) as real:
        assert {name: node["role"] for name, node in (await real.status()).items()} == {
            "decode-0": "decode",
            "router-0": "router",
        }
        async with real.client() as client:
            answer = await client.post("/v1/completions", json=body(20))
            assert answer.json()["usage"]["completion_tokens"] == 20
        below = descendants(real.process.pid)
        done = await asyncio.to_thread(here.run, "down")
        assert (done.returncode, done.stdout, done.stderr) == (0, "stopped\n", "")
        assert (real.process.wait(5), *real.process.communicate()) == (0, DRAINING + "stopped\n", "")
        await ended(below)
        real.assert_nothing_left()
        done = await asyncio.to_thread(here.run, "down")
        assert (done.returncode, done.stdout) == (0, "nothing runs in namespace 'pdserve'\n")


async def test_ctrl_c_lets_requests_end(here: Shell, noise_llama: Path) -> None:
    with up(here, *SMALL, model=str(noise_llama)) as real:
        async with real.client() as client, streams(client, [body(500)]) as (running,):
            await running.until(3)
            code, said, complained = await real.stop(signal.SIGINT)
        assert (running.finish, running.error) == ("length", {})
        assert (code, said, complained) == (0, DRAINING + "stopped\n", "")
        real.assert_nothing_left()


async def test_ctrl_c_twice_waits_for_nobody(here: Shell, noise_llama: Path) -> None:
    with up(here, *SMALL, "--max-context", "2000", "--set", "engine.step_tokens=1", model=str(noise_llama)) as real:
        async with real.client() as client, streams(client, [body(1990)] * 8) as running:
            await asyncio.gather(*(stream.until(3) for stream in running))
            code, _, complained = await real.stop(signal.SIGINT, signal.SIGINT)
        assert [stream.finish for stream in running] == [""] * 8
        assert all(stream.error for stream in running)
        assert (code, complained) == (0, "")
        real.assert_nothing_left()


async def test_killed(here: Shell, noise_llama: Path) -> None:
    """Every node and Valkey end with it (Ray's own agents take up to a minute); its files go with the next command."""
    with up(here, *SMALL, model=str(noise_llama)) as real:
        below = descendants(real.process.pid)
        nodes = {node["pid"] for node in (await real.status()).values()}
        servers = {pid for pid in below if b"valkey-server" in Path(f"/proc/{pid}/cmdline").read_bytes()}
        assert (len(nodes), len(servers)) == (3, 1)
        try:
            kill_and_wait(real.process.pid)
            await ended(nodes | servers)
        finally:
            kill_all(below)
        assert here.left()
        done = await asyncio.to_thread(here.run, "status")
        assert done.stderr.startswith("pdserve: nothing runs in namespace 'pdserve'")
        real.assert_nothing_left()


async def test_a_ray_cluster_that_was_there_stays(here: Shell, noise_llama: Path) -> None:
    """--address joins; SIGTERM ends what we started and nothing else."""
    (port,) = free_ports(1)
    ray = Path(sys.executable).with_name("ray")
    options = f"start --head --block --port {port} --num-cpus 1 --include-dashboard=false --disable-usage-stats"
    head = subprocess.Popen(
        [ray, *options.split(), "--object-store-memory", "80000000", "--temp-dir", str(here.cache.parent / "r")],
        env=here.environment | {"RAY_AUTH_MODE": "disabled"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        assert head.stdout is not None
        assert any("Ray runtime started" in line for line in head.stdout)
        with up(here, *SMALL, "--address", f"127.0.0.1:{port}", model=str(noise_llama)) as real:
            async with real.client() as client:
                answer = await client.post("/v1/completions", json=body(20))
                assert answer.json()["usage"]["completion_tokens"] == 20
            pids = {node["pid"] for node in (await real.status()).values()}
            assert pids <= descendants(head.pid)
            code, said, complained = await real.stop(signal.SIGTERM)
            assert (code, said, complained) == (0, DRAINING + "stopped\n", "")
            await ended(pids)
            assert head.poll() is None
            assert real.shell.left() == []
    finally:
        kill_all(descendants(head.pid) | {head.pid})
        head.communicate()


async def test_sigterm_while_it_starts(here: Shell, noise_llama: Path) -> None:
    with up(here, *SMALL, model=str(noise_llama), until="Ray is up") as real:
        code, said, complained = await real.stop(signal.SIGTERM)
        assert (code, complained) == (0, "")
        assert said.endswith("stopping\n")
        real.assert_nothing_left()
