"""TOML < environment < settings; what is wrong is named, with the nearest that would be right."""

from pathlib import Path
from typing import Any

import pytest

from contracts.config import Config, parse_bytes
from contracts.config_loader import load_config, parse_settings
from contracts.errors import ConfigError


def test_without_sources_it_is_the_default_tree() -> None:
    assert load_config() == Config()


def test_sources_override_in_order(tmp_path: Path) -> None:
    file = tmp_path / "pdserve.toml"
    file.write_text('[kv]\nblock_size = 8\nblocks = 1\nmemory = "1MiB"\n[transfer]\nlease_seconds = 2\n')
    environment = {"PDSERVE_KV_BLOCKS": "2", "PDSERVE_KV_MEMORY": "2MiB", "HOME": "/", "PDSERVE_TEST_LOOPS": "9"}
    config = load_config(file, environment, {"kv.memory": "3MiB"})
    assert (config.kv.block_size, config.kv.blocks, config.kv.memory) == (8, 2, "3MiB")
    assert config.transfer.lease_seconds == 2.0
    assert config.model == Config().model


def test_cache_has_a_short_name() -> None:
    assert load_config(environment={"PDSERVE_CACHE": "/x"}).model.cache_path() == Path("/x")


@pytest.mark.parametrize(
    ("settings", "environment", "message"),
    [
        ({"kv.block_sise": 1}, {}, "unknown configuration key 'kv.block_sise'; did you mean 'kv.block_size'?"),
        ({"block_size": 1}, {}, "unknown configuration key 'block_size'; did you mean 'kv.block_size'?"),
        ({"": 1}, {}, "unknown configuration key ''"),
        ({}, {"PDSERVE_KV_BLOCKSIZE": "1"}, "unknown environment variable PDSERVE_KV_BLOCKSIZE; did you mean "),
        ({"kv.block_size": "many"}, {}, "kv.block_size must be of type int, not 'many'"),
        ({"kv.block_size": 1.5}, {}, "kv.block_size must be of type int, not 1.5"),
        ({"kv.block_size": True}, {}, "kv.block_size must be of type int, not True"),
        ({"kv.block_size": ""}, {}, "kv.block_size must be of type int, not ''"),
        ({"model.name": 3}, {}, "model.name must be of type str, not 3"),
        ({"limits.request_seconds": "soon"}, {}, "limits.request_seconds must be of type float, not 'soon'"),
        ({"kv.block_size": 0}, {}, "kv.block_size must be at least 1, not 0"),
        ({"transfer.frame_bytes": 1 << 27}, {}, "transfer.frame_bytes must be at most 67108864, not 134217728"),
        ({"router.http_port": 65536}, {}, "router.http_port must be a port (0 to 65535), not 65536"),
        ({"limits.request_seconds": "nan"}, {}, "limits.request_seconds must be above 0 seconds and finite, not nan"),
        ({"limits.stuck_seconds": "inf"}, {}, "limits.stuck_seconds must be above 0 seconds and finite, not inf"),
        ({"limits.lost_seconds": -1}, {}, "limits.lost_seconds must be above 0 seconds and finite, not -1.0"),
        ({"limits.slow_client_seconds": 0}, {}, "limits.slow_client_seconds must be above 0 seconds"),
        ({"limits.silent_header_seconds": "nan"}, {}, "limits.silent_header_seconds must be above 0 seconds"),
        ({"limits.body_bytes": 0}, {}, "limits.body_bytes must be at least 1, not 0"),
        ({"transfer.lease_seconds": 0}, {}, "transfer.lease_seconds must be above 0 seconds and finite, not 0.0"),
        ({"kv.memory": "lots"}, {}, "kv.memory must be a size such as 512MiB or 2GiB, not 'lots'"),
        ({"kv.memory": "1e999GiB"}, {}, "kv.memory must be a size such as 512MiB or 2GiB, not '1e999GiB'"),
        ({"kv.memory": "-1GiB"}, {}, "kv.memory must be a size"),
        ({"cluster.mode": "both"}, {}, "cluster.mode must be one of disaggregated, aggregated, not 'both'"),
        ({"router.policy": "best"}, {}, "router.policy must be one of least_loaded, round_robin, not 'best'"),
        ({"transfer.transport": "pigeon"}, {}, "transfer.transport must be one of auto, grpc, memory, nccl"),
        ({"model.dtype": "int3"}, {}, "model.dtype must be one of float32, bfloat16, not 'int3'"),
    ],
)
def test_what_is_wrong_is_named(settings: dict[str, Any], environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, environment, settings)
    assert caught.value.message.startswith(message)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[kv]\nblok_size = 1", "unknown configuration key 'kv.blok_size'; did you mean 'kv.block_size'?"),
        (b"[kw]\nblocks = 1", "unknown configuration key 'kw.blocks'; did you mean 'kv.blocks'?"),
        (b"kv = 3", "unknown configuration key 'kv'"),
        (b"[kv]\nblocks = '1 GB'", "kv.blocks must be of type int, not '1 GB'"),
        (b"[kv]\nblocks = [1]", "kv.blocks must be of type int, not [1]"),
        (b"[kv", "{file} is not valid TOML: "),
        (b"\xff\xfe", "{file} is not valid TOML: "),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "c.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert caught.value.message.startswith(message.format(file=file))
    assert "\n" not in caught.value.message


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the configuration file .*: No such file or directory"):
        load_config(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="cannot read the configuration file .*: Is a directory"):
        load_config(tmp_path)


def test_settings_are_pairs() -> None:
    assert parse_settings(["a.b=c=d", " e.f = g "]) == {"a.b": "c=d", "e.f": "g"}
    with pytest.raises(ConfigError, match="--set takes key=value, not 'a.b'"):
        parse_settings(["a.b"])


@pytest.mark.parametrize(
    ("text", "size"), [("64KiB", 65536), ("0.5MiB", 524288), ("1GiB", 1 << 30), ("7", 7), ("8 B", 8)]
)
def test_sizes(text: str, size: int) -> None:

    assert parse_bytes("kv.memory", text) == size
