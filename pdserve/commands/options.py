"""Options that several commands share, and the way from options to a configuration."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from contracts.config import Config
from contracts.config_loader import load_config, parse_settings

ConfigFile = Annotated[Path | None, typer.Option("--config", help="TOML file with the configuration.")]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any configuration key.")]
CacheDir = Annotated[str | None, typer.Option("--cache-dir", help="Where models and run files are kept.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def configuration(file: Path | None, pairs: list[str] | None, **flags: Any) -> Config:
    """File < environment < `--set` < flags. A flag is named like its key with __ for the dot; None: not given.

    Raises ConfigError.
    """
    settings: dict[str, Any] = dict(parse_settings(pairs or []))
    settings |= {name.replace("__", "."): value for name, value in flags.items() if value is not None}
    return load_config(file, os.environ, settings)
