"""`pdserve up` with what cannot be: one clear line, an exit code, no traceback, nothing left behind, no wait."""

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from contracts.config import ModelConfig
from tests.helpers.checkpoints import noise_tensors, write_noise_variant
from tests.helpers.real_cluster import Shell, shell
from text.model_resolver import resolve_model

pytestmark = pytest.mark.cluster

_SECONDS = 120.0  # for the slowest, which starts Ray and a worker first


@pytest.fixture
def here() -> Iterator[Shell]:
    with shell() as made:
        yield made


def refused(here: Shell, *arguments: str) -> tuple[int, str]:
    """The exit code and the one line."""
    done = here.run("up", "--http-port", "0", "--grpc-port", "0", *arguments, seconds=_SECONDS)
    assert done.returncode != 0
    assert done.stderr.startswith("pdserve: ")
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stdout
    assert here.left() == []
    return done.returncode, done.stderr.removeprefix("pdserve: ").rstrip("\n")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--mode", "nonsense"], "cluster.mode must be one of disaggregated, aggregated, not 'nonsense'"),
        (["--set", "kv.blokcs=3"], "unknown configuration key 'kv.blokcs'; did you mean 'kv.blocks'?"),
        (["--set", "transfer.transport=pigeon"], "transfer.transport must be one of auto, grpc, memory, nccl"),
        (["--config", "/nowhere.toml"], "cannot read the configuration file /nowhere.toml: No such file or directory"),
        (["--redis-url", "ftp://127.0.0.1"], "cluster.redis_url: Redis URL must specify one of the following schemes"),
    ],
)
def test_a_wrong_configuration(here: Shell, noise_llama: Path, arguments: list[str], line: str) -> None:
    code, said = refused(here, "--model", str(noise_llama), *arguments)
    assert code == 2
    assert said.startswith(line)


def test_a_file_that_is_no_toml(here: Shell, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("[kv\nblocks = 3\n")
    code, said = refused(here, "--config", str(tmp_path / "bad.toml"))
    assert code == 2
    assert said.startswith(f"{tmp_path}/bad.toml is not valid TOML: ")


def test_no_such_model(here: Shell) -> None:
    assert refused(here, "--model", "smollm2-136m") == (
        1,
        "no model 'smollm2-136m': no such file or directory, and the known names are smollm2-135m; "
        "did you mean 'smollm2-135m'?",
    )


def test_another_kind_of_model(here: Shell, tmp_path: Path) -> None:
    write_noise_variant(tmp_path, noise_tensors(), model_type="gpt2")
    line = f"{tmp_path}/config.json: model type 'gpt2' is not supported; supported: llama"
    assert refused(here, "--model", str(tmp_path)) == (1, line)


def test_damaged_weights(here: Shell, tmp_path: Path) -> None:
    write_noise_variant(tmp_path, noise_tensors(), shards=3)
    shard = tmp_path / "model-00002-of-00003.safetensors"
    size = shard.stat().st_size
    os.truncate(shard, 1000)
    line = f"{shard} is damaged: it has 1000 bytes, its header says {size}"
    assert refused(here, "--model", str(tmp_path)) == (1, line)
    shard.unlink()
    line = f"{shard} is missing; model.safetensors.index.json names it"
    assert refused(here, "--model", str(tmp_path)) == (1, line)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    index["weight_map"]["lm_head.weight"] = "/etc/passwd"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert refused(here, "--model", str(tmp_path))[0] == 1


@pytest.mark.model
def test_a_truncated_gguf(here: Shell, tmp_path: Path) -> None:
    whole = resolve_model(ModelConfig(cache_dir=str(here.cache)), lambda _: None).path
    for size in (0, 5000, 50_000_000):
        with whole.open("rb") as stream:
            (tmp_path / "part.gguf").write_bytes(stream.read(size))
        code, said = refused(here, "--model", str(tmp_path / "part.gguf"))
        assert code == 1
        assert said.startswith(f"{tmp_path}/part.gguf is ")


def test_a_pool_that_holds_no_block(here: Shell, noise_llama: Path) -> None:
    line = "kv.memory 1KiB holds no KV block of 8192 bytes"
    assert refused(here, "--model", str(noise_llama), "--kv-memory", "1KiB") == (1, line)


def test_an_address_of_another_machine(here: Shell, noise_llama: Path) -> None:
    line = "cannot listen for HTTP on 198.51.100.1:0: Cannot assign requested address"
    assert refused(here, "--model", str(noise_llama), "--host", "198.51.100.1") == (1, line)


def test_nobody_is_ray(here: Shell, noise_llama: Path) -> None:
    line = "cannot join the Ray cluster at 127.0.0.1:1: Connection refused"
    assert refused(here, "--model", str(noise_llama), "--address", "127.0.0.1:1") == (1, line)


def test_nobody_is_redis(here: Shell, noise_llama: Path) -> None:
    code, said = refused(here, "--model", str(noise_llama), "--redis-url", "redis://:hidden@127.0.0.1:1")
    assert code == 1
    assert said.startswith("--redis-url cannot be used: redis at 127.0.0.1:1: ")


def test_a_redis_that_says_nothing(here: Shell, noise_llama: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"127.0.0.1:{silent.getsockname()[1]}"
        done = here.run("up", "--model", str(noise_llama), "--redis-url", f"redis://{url}", seconds=5)
        assert (done.returncode, done.stderr) == (
            1,
            f"pdserve: --redis-url cannot be used: redis at redis://{url} does not answer\n",
        )
        assert here.left() == []
