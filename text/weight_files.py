"""The safetensors files of a model directory. Called by model_resolver.py; reads headers, never tensors."""

import json
import struct
from pathlib import Path
from typing import Any

from contracts.errors import ModelError

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


def find_weight_files(directory: Path) -> tuple[Path, ...]:
    """The shards that the index names, or the single file; each checked to be there and whole.

    Raises ModelError naming the file that is missing, unreadable or cut short.
    """
    index = directory / _INDEX
    if not index.exists():
        path = directory / _SINGLE
        if not path.is_file():
            raise ModelError(f"{directory} has neither {_SINGLE} nor {_INDEX}")
        _tensor_names(path)
        return (path,)
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelError(f"{index}: weight_map must map tensors to file names")
    shards = tuple(directory / name for name in sorted(set(weight_map.values())))
    if not shards:
        raise ModelError(f"{index} names no file")
    for shard in shards:
        if not shard.is_file():
            raise ModelError(f"{shard} is missing; {_INDEX} names it")
        lacking = {tensor for tensor, name in weight_map.items() if name == shard.name} - _tensor_names(shard)
        if lacking:
            raise ModelError(f"{shard} lacks the tensor {min(lacking)}; {_INDEX} says that it is there")
    return shards


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ModelError naming the file."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ModelError(f"{path} is missing") from error
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return value


def _tensor_names(path: Path) -> set[str]:
    """Names in the header of a safetensors file (its specification: u64 length, JSON, data). Raises
    ModelError unless the file ends exactly where its last tensor does."""
    size = path.stat().st_size
    try:
        with path.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > size - 8:
                raise ModelError(f"{path} is truncated: its header alone is longer than the file")
            header: dict[str, Any] = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    except (struct.error, ValueError, AttributeError, LookupError, TypeError) as error:
        raise ModelError(f"{path} is not a valid safetensors file") from error
    if end != size:
        raise ModelError(f"{path} is damaged: it has {size} bytes, its header says {end}")
    return set(header)
