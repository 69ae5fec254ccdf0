"""Plugs of a seam: one file each, and the file's name is the value in the configuration.

A seam's folder holds `base.py` (the Protocol) and one module per plug. Each plug module has one factory
named `create`. Adding a file adds a plug.
"""

import importlib
import pkgutil
from difflib import get_close_matches
from typing import Any

from contracts.errors import ConfigError

SEAMS: dict[str, str] = {
    "link": "protos.links",
    "transport": "kv_transfer.transports",
    "attention": "engine.attention",
    "runner": "engine.runners",
    "model": "engine.models",
    "policy": "router.policies",
    "registry": "shared_state.backends",
}
_NOT_PLUGS = {"base", "layers"}


def plugs(seam: str) -> list[str]:
    """Names of the plugs of a seam, sorted, without importing any of them."""
    package = importlib.import_module(SEAMS[seam])
    return sorted(m.name for m in pkgutil.iter_modules(package.__path__) if m.name not in _NOT_PLUGS)


def load_plug(seam: str, name: str) -> Any:
    """The plug's module. Raises ConfigError naming the known plugs when there is none of that name."""
    known = plugs(seam)
    if name not in known:
        near = get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"no {seam} named {name!r}; there are: {', '.join(known)}{hint}")
    return importlib.import_module(f"{SEAMS[seam]}.{name}")
