"""The Ray shell with a node that only greets: starts, comes back after SIGKILL, reports failures, leaves nothing."""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.launch import launch
from cluster.placement import RayPlacement
from cluster.run_file import RunFile
from contracts.config import ClusterConfig, Config, ModelConfig, RouterConfig
from contracts.errors import StartupError
from contracts.workers import Role, WorkerInfo
from tests.helpers.fake_node import build_fake_node
from tests.helpers.processes import descendants, ended, kill_and_wait

pytestmark = pytest.mark.cluster

CONFIG = Config(cluster=ClusterConfig(namespace="shell-test"))


@pytest.fixture
async def placement(tmp_path_factory: pytest.TempPathFactory, others: set[int]) -> AsyncIterator[RayPlacement]:
    """An own Ray; every process of it has ended when the test is over."""
    placement = RayPlacement(CONFIG.cluster, tmp_path_factory.mktemp("r"))
    assert await placement.open() == 1
    children = descendants(os.getpid()) - others
    yield placement
    await placement.close()
    await ended(children)


async def test_a_killed_actor_serves_again_as_a_new_incarnation(placement: RayPlacement) -> None:
    node = await placement.place(build_fake_node, CONFIG, Role.DECODE, "decode-0")
    other = await placement.place(build_fake_node, CONFIG, Role.PREFILL, "prefill-0")
    first, bystander = await node.describe(), await other.describe()
    assert await greeting(first) == first.incarnation

    kill_and_wait(first.pid)
    second = await node.actor.describe.options(max_task_retries=-1).remote()

    assert (second.pid, second.incarnation) != (first.pid, first.incarnation)
    assert await greeting(second) == second.incarnation
    assert await other.describe() == bystander

    await node.stop(1.0)
    with pytest.raises(ConnectionRefusedError):
        await greeting(second)
    await node.stop(1.0)


async def test_a_failed_start_is_one_clear_error_and_is_not_repeated(placement: RayPlacement) -> None:
    broken = replace(CONFIG, model=ModelConfig(name="broken"))
    node = await placement.place(build_fake_node, broken, Role.DECODE, "decode-0")
    for _ in range(2):
        with pytest.raises(StartupError, match="the file of the model is broken"):
            await node.describe()
    buggy = replace(CONFIG, model=ModelConfig(name="bug"))
    node = await placement.place(build_fake_node, buggy, Role.PREFILL, "prefill-0")
    with pytest.raises(StartupError, match="prefill-0 cannot start: KeyError: 'nobody thought of this'"):
        await node.describe()
    with pytest.raises(StartupError, match="decode-0 already runs in the namespace 'shell-test'"):
        await placement.place(build_fake_node, CONFIG, Role.DECODE, "decode-0")


async def test_launch_serves_and_leaves_nothing(
    tmp_path: Path, short: Path, fixture_model: str, others: set[int]
) -> None:
    config = launchable(tmp_path, fixture_model)
    before = set(Path("/dev/shm").iterdir())
    said: list[str] = []

    cluster = await launch(config, said.append, build_fake_node)

    run_file = RunFile(config.model.cache_path(), "shell-test")
    assert run_file.read() == cluster.record
    assert cluster.record.http in "\n".join(said)
    with pytest.raises(StartupError, match="namespace 'shell-test' already runs as process"):
        await launch(config, said.append, build_fake_node)
    children = descendants(os.getpid()) - others
    await cluster.drain(0.5)
    await cluster.close()

    await ended(children)
    assert run_file.read() is None
    assert not list(short.iterdir())
    assert set(Path("/dev/shm").iterdir()) == before


async def test_launch_that_fails_leaves_nothing(
    tmp_path: Path, short: Path, fixture_model: str, others: set[int]
) -> None:
    config = launchable(tmp_path, fixture_model)
    broken = replace(config, model=replace(config.model, name="broken"))
    with pytest.raises(StartupError, match="the file of the model is broken"):
        await launch(broken, unheard, build_fake_node)
    assert not list(short.iterdir())
    assert RunFile(config.model.cache_path(), "shell-test").read() is None
    await ended(descendants(os.getpid()) - others)


async def test_an_unreachable_redis_is_one_line(tmp_path: Path, short: Path, fixture_model: str) -> None:
    config = launchable(tmp_path, fixture_model)
    nobody = replace(config, cluster=replace(config.cluster, redis_url=f"unix://{short}/nobody.sock"))
    with pytest.raises(StartupError, match=r"--redis-url cannot be used: redis at unix:///.*/nobody\.sock[^\n]+$"):
        await launch(nobody, unheard, build_fake_node)
    assert not list(short.iterdir())


async def test_a_cancelled_launch_leaves_nothing(
    tmp_path: Path, short: Path, fixture_model: str, others: set[int]
) -> None:
    started = asyncio.Event()

    def say(line: str) -> None:
        if "Valkey is up" in line:
            started.set()

    task = asyncio.create_task(launch(launchable(tmp_path, fixture_model), say, build_fake_node))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not list(short.iterdir())
    await ended(descendants(os.getpid()) - others)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The system's directory for temporary files: short enough for Ray's sockets, and ours alone."""
    with tempfile.TemporaryDirectory(prefix="t-") as directory:
        monkeypatch.setattr("tempfile.tempdir", directory)
        yield Path(directory)


@pytest.fixture
def fixture_model(monkeypatch: pytest.MonkeyPatch) -> str:
    """The launcher resolves a model before it starts anything; here resolving is not what is tested."""

    class Files:
        class metadata:  # noqa: N801 - stands for ModelFiles.metadata
            name = "fixture"

    monkeypatch.setattr("cluster.launch.resolve_model", lambda config, progress: Files)
    return "fixture"


def launchable(tmp_path: Path, model: str) -> Config:
    return replace(
        CONFIG,
        model=ModelConfig(name=model, cache_dir=str(tmp_path / "cache")),
        router=RouterConfig(http_port=0, grpc_port=0),
    )


def unheard(line: str) -> None:
    """What a launch says that nobody reads."""


async def greeting(info: WorkerInfo) -> int:
    host, port = info.address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"\n")
    answer = int(await reader.read())
    writer.close()
    await writer.wait_closed()
    return answer
