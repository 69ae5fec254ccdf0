"""Fills the configuration tree: TOML file < environment < `--set a.b=c` and flags.

The environment names a key as PDSERVE_ + path in capitals with _ for the dot (PDSERVE_KV_BLOCK_SIZE is
kv.block_size); PDSERVE_CACHE is model.cache_dir. An unknown key is an error that names the nearest.
"""

import dataclasses
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from contracts.config import Config
from contracts.errors import ConfigError

_ALIASES = {"PDSERVE_CACHE": "model.cache_dir"}
_TEST_PREFIX = "PDSERVE_TEST_"
_TRUE, _FALSE = ("true", "1", "yes"), ("false", "0", "no")


def load_config(
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Config:
    """The validated tree. `settings` maps dotted keys to values (strings are converted to the key's type).

    Raises ConfigError for an unreadable file, an unknown key, or a value of the wrong type or range.
    """
    known = _known_keys()
    values: dict[str, Any] = {}
    if file is not None:
        values.update(_from_toml(file, known))
    values.update(_from_environment(environment or {}, known))
    for key, value in (settings or {}).items():
        values[_known(key, known)] = value
    branches: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        branch, name = key.split(".")
        branches.setdefault(branch, {})[name] = _convert(key, value, known[key])
    tree = Config()
    changed = {branch: dataclasses.replace(getattr(tree, branch), **fields) for branch, fields in branches.items()}
    return dataclasses.replace(tree, **changed).validate()


def parse_settings(pairs: list[str]) -> dict[str, str]:
    """`["a.b=c"]` as a mapping. Raises ConfigError for a pair without "="."""
    settings: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"--set takes key=value, not {pair!r}", param="set")
        settings[key.strip()] = value.strip()
    return settings


def _known_keys() -> dict[str, type]:
    tree = Config()
    return {
        f"{branch.name}.{leaf.name}": type(getattr(getattr(tree, branch.name), leaf.name))
        for branch in dataclasses.fields(tree)
        for leaf in dataclasses.fields(getattr(tree, branch.name))
    }


def _known(key: str, known: Mapping[str, type]) -> str:
    if key in known:
        return key
    near = get_close_matches(key, known, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"unknown configuration key {key!r}{hint}", param=key)


def _from_toml(file: Path, known: Mapping[str, type]) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            tree = tomllib.load(stream)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from error
    values: dict[str, Any] = {}
    for branch, fields in tree.items():
        for name, value in (fields if isinstance(fields, dict) else {"": fields}).items():
            values[_known(f"{branch}.{name}".rstrip("."), known)] = value
    return values


def _from_environment(environment: Mapping[str, str], known: Mapping[str, type]) -> dict[str, str]:
    by_name = {"PDSERVE_" + key.upper().replace(".", "_"): key for key in known} | _ALIASES
    values: dict[str, str] = {}
    for name, value in environment.items():
        if not name.startswith("PDSERVE_") or name.startswith(_TEST_PREFIX):
            continue
        if name not in by_name:
            near = get_close_matches(name, by_name, n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"unknown environment variable {name}{hint}", param=name)
        values[by_name[name]] = value
    return values


def _convert(key: str, value: Any, kind: type) -> Any:
    if isinstance(value, str) and kind is not str:
        lowered = value.lower()
        if kind is bool and lowered in _TRUE + _FALSE:
            return lowered in _TRUE
        try:
            return kind(value) if kind is not bool else _wrong(key, value, kind)
        except ValueError:
            _wrong(key, value, kind)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind:
        _wrong(key, value, kind)
    return value


def _wrong(key: str, value: Any, kind: type) -> None:
    raise ConfigError(f"{key} must be of type {kind.__name__}, not {value!r}", param=key)
