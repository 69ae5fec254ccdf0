"""The header of a GGUF file: its key-value metadata and where its tensors lie.

Called by gguf_metadata.py and gguf_tokenizer.py; a weight loader can find tensors with it. It never reads
tensor data. `gguf.GGUFReader` makes numpy views of each of 100,000 vocabulary strings, which takes two
seconds for a small model; this reader decodes the same format (GGUF specification, versions 2 and 3) in a
tenth of a second and checks that every tensor lies inside the file.
"""

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from contracts.errors import ModelError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies. `shape` is in GGUF order, the fastest dimension first; `type` is the name of a
    gguf.GGMLQuantizationType; `offset` counts bytes from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """A parsed header. `raw` is all of it, as it stands in the file."""

    path: Path
    fields: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    raw: bytes

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """The value of `key`, or `default` where it is absent. Raises ModelError when it is absent without a
        default, or not of type `kind` (an int counts as a float)."""
        value = self.fields.get(key, default)
        if value is None:
            raise ModelError(f"{self.path}: the GGUF metadata lacks {key}")
        if kind is float and type(value) is int:
            return float(value)
        if type(value) is not kind:
            raise ModelError(f"{self.path}: the GGUF metadata {key} is not of type {kind.__name__}")
        return value


def read_gguf_header(path: Path) -> GgufHeader:
    """Parse and check `path`. Raises ModelError for what is no GGUF file, damaged, or cut short anywhere."""
    try:
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data).header()
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # an empty file cannot be mapped; damaged text is no UTF-8
        raise ModelError(f"{path} is not a valid GGUF file: {error}") from error


class _Reader:
    """A cursor over a mapped file. Every read checks that the bytes are there."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._at = 0

    def header(self) -> GgufHeader:
        """The whole header, in the order of the file."""
        if self._take(4) != b"GGUF":
            raise ModelError(f"{self._path} is not a GGUF file")
        version = self._scalar("I")
        if version not in (2, 3):
            raise ModelError(f"{self._path}: GGUF version {version} is not supported; supported: 2, 3 (little-endian)")
        tensor_count, field_count = self._scalar("Q"), self._scalar("Q")
        fields: dict[str, Any] = {}
        for _ in range(field_count):
            key = self._string()
            fields[key] = self._value(self._scalar("I"))
        infos = [self._tensor_info() for _ in range(tensor_count)]
        alignment = fields.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1:
            raise ModelError(f"{self._path}: general.alignment {alignment!r} is not valid")
        raw = self._data[: self._at]
        start = -(-self._at // alignment) * alignment
        tensors = {name: self._place(name, shape, kind, start + offset) for name, shape, kind, offset in infos}
        return GgufHeader(self._path, fields, tensors, raw)

    def _take(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._data):
            raise self._truncated(end)
        piece = self._data[self._at : end]
        self._at = end
        return piece

    def _scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))[0]

    def _string(self) -> str:
        return self._take(self._scalar("Q")).decode()

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(self._scalar("I"), self._scalar("Q"))
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        raise ModelError(f"{self._path} is damaged: unknown GGUF value type {kind}")

    def _array(self, kind: int, count: int) -> list[Any]:
        if kind in _SCALARS:
            code = _SCALARS[kind]
            return list(struct.unpack(f"<{count}{code}", self._take(count * struct.calcsize("<" + code))))
        if kind == _STRING:
            return [self._string() for _ in range(count)]
        raise ModelError(f"{self._path}: a GGUF array of value type {kind} is not supported")

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        shape = tuple(self._array(10, self._scalar("I")))
        return name, shape, self._scalar("I"), self._scalar("Q")

    def _place(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
        try:
            quantisation = GGMLQuantizationType(kind)
        except ValueError as error:
            raise ModelError(f"{self._path}: tensor {name} has the unknown type {kind}") from error
        block, block_bytes = GGML_QUANT_SIZES[quantisation]
        size = math.prod(shape) // block * block_bytes
        if offset + size > len(self._data):
            raise self._truncated(offset + size)
        return GgufTensor(name, shape, quantisation.name, offset, size)

    def _truncated(self, needed: int) -> ModelError:
        return ModelError(f"{self._path} is truncated: it has {len(self._data)} bytes and needs at least {needed}")
