"""What the registry stores: small dataclasses (a worker's description, its load) as JSON.

Fields that a reader does not know are passed over, so that versions can meet; a field of another type, or
one that is missing and has no default, makes the record unreadable. Called by shared_state/registry.py.
"""

import json
from dataclasses import MISSING, asdict, fields
from enum import Enum
from typing import Any, TypeVar, get_type_hints

_T = TypeVar("_T")


def encode(record: Any) -> bytes:
    """A dataclass of str, int, bool and Enum fields; equal ones give equal bytes."""
    return json.dumps(asdict(record), default=lambda member: member.value).encode()


def decode(kind: type[_T], value: bytes) -> _T:
    """The dataclass `kind` again. Raises ValueError for anything else."""
    record = json.loads(value)
    if not isinstance(record, dict):
        raise ValueError(f"an object was expected, not {record!r}")  # noqa: TRY004 - one kind to catch
    hints = get_type_hints(kind)
    given = {
        field.name: _field(field.name, hints[field.name], record.get(field.name))
        for field in fields(kind)  # type: ignore[arg-type]  # `kind` is a dataclass; TypeVar cannot say so
        if field.name in record or field.default is MISSING
    }
    return kind(**given)


def _field(name: str, kind: Any, value: Any) -> Any:
    if issubclass(kind, Enum):
        return kind(value)
    if type(value) is not kind:
        raise ValueError(f"{name} must be of type {kind.__name__}, not {value!r}")
    return value
