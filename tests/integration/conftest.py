"""Checkpoints and real clusters that many tests share."""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.checkpoints import make_noise_llama
from tests.helpers.otlp_collector import OtlpCollector
from tests.helpers.processes import descendants
from tests.helpers.real_cluster import RealCluster, shell, up
from tests.helpers.valkey import ValkeyServer


@pytest.fixture(scope="session")
def noise_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """See make_noise_llama."""
    directory = tmp_path_factory.mktemp("noise-llama")
    make_noise_llama(directory)
    return directory


@dataclass(frozen=True, slots=True)
class NoiseCluster:
    """Two prefill and two decode workers that serve noise-llama as "noise", and what they are connected to."""

    real: RealCluster
    valkey: ValkeyServer
    collector: OtlpCollector


@pytest.fixture(scope="session")
def noise_cluster(noise_llama: Path) -> Iterator[NoiseCluster]:
    """Small steps, so that a prompt takes many of them and there is time to break something."""
    with ExitStack() as stack:
        collector = stack.enter_context(OtlpCollector())
        where = stack.enter_context(shell(OTEL_BSP_SCHEDULE_DELAY="100"))
        valkey = stack.enter_context(ValkeyServer(where.cache.parent))
        pools = ["--prefill", "2", "--decode", "2", "--set", "kv.blocks=2048", "--step-tokens", "16", "--threads", "1"]
        links = ["--redis-url", valkey.url, "--set", f"telemetry.otlp_endpoint={collector.endpoint}"]
        started = up(where, *pools, *links, "--served-model-name", "noise", model=str(noise_llama))
        yield NoiseCluster(stack.enter_context(started), valkey, collector)


@pytest.fixture(scope="session")
def smollm2_cluster() -> Iterator[RealCluster]:
    """One prefill and one decode worker that serve smollm2-135m, and our own Valkey. A request whose worker died
    is given up before another can be there."""
    with shell() as where, up(where, "--set", "limits.lost_seconds=0.5", model="smollm2-135m") as real:
        yield real


@pytest.fixture
def others() -> set[int]:
    """Our processes that ran before the test, such as the clusters of the session."""
    return descendants(os.getpid())
