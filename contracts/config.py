"""The configuration: a tree of small frozen dataclasses. config_loader.py fills it.

Each object of the program receives only its branch. A value that cannot be right is refused here, with
the key's name.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from contracts.errors import ConfigError
from contracts.seams import plugs

MOST_FRAME_BYTES = 64 * 1024 * 1024
"""Bytes of KV in one message, at most: links hold whole messages in memory and cap them."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model, and how it is computed. `max_context` 0: what the model was trained for."""

    name: str = "smollm2-135m"
    served_name: str = ""
    dtype: str = "float32"
    device: str = "cpu"
    cache_dir: str = ""
    max_context: int = 0

    def cache_path(self) -> Path:
        """Where downloaded models are kept."""
        return Path(self.cache_dir).expanduser() if self.cache_dir else Path.home() / ".cache" / "pdserve"


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """What `pdserve up` starts. `ray_address` and `redis_url` "": start our own. `secret` is mandatory
    beyond one host; `hash_key` keys the block hashes; both are drawn by `up` when empty."""

    mode: str = "disaggregated"
    routers: int = 1
    prefill: int = 1
    decode: int = 1
    host: str = "127.0.0.1"
    ray_address: str = ""
    redis_url: str = ""
    namespace: str = "pdserve"
    secret: str = field(default="", repr=False)
    hash_key: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One engine. `threads` 0: cores divided by workers. `step_tokens`: token budget of a step."""

    threads: int = 0
    max_running: int = 32
    step_tokens: int = 512
    runner: str = "torch_runner"
    attention: str = "reference"


@dataclass(frozen=True, slots=True)
class KvConfig:
    """The pool. `blocks` wins over `memory` (bytes, or with suffix KiB MiB GiB). `growth_tokens`: room for
    generated tokens that a decode reservation holds from the start."""

    block_size: int = 16
    memory: str = "1GiB"
    blocks: int = 0
    growth_tokens: int = 64


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """The hand-over. Times in seconds. `transport` "auto": the first that works for a pair of workers. `tls_...`:
    names of PEM files, all three or none; transport tcp then encrypts, and takes nobody whose certificate `tls_ca`
    has not signed."""

    transport: str = "auto"
    frame_bytes: int = 8 * 1024 * 1024
    lease_seconds: float = 15.0
    park_seconds: float = 5.0
    silence_seconds: float = 3.0
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """`backlog_tokens` 0: four steps' budget."""

    backlog_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """The public face. Port 0 lets the system choose."""

    policy: str = "least_loaded"
    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    queue_requests: int = 256
    queue_prompt_tokens: int = 262_144


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    """Limits of a request. `lost_seconds`: how long a request whose worker died waits for another one;
    `attempts`: how often workers may be lost under one request."""

    request_seconds: float = 600.0
    lost_seconds: float = 3.0
    attempts: int = 4
    body_bytes: int = 8 * 1024 * 1024
    silent_header_seconds: float = 15.0
    slow_client_seconds: float = 60.0
    stuck_seconds: float = 30.0


@dataclass(frozen=True, slots=True)
class TelemetryConfig:
    """`otlp_endpoint` "": no traces, no span objects. `trace_ratio`: share of new traces kept."""

    otlp_endpoint: str = ""
    trace_ratio: float = 1.0
    log_level: str = "info"


@dataclass(frozen=True, slots=True)
class Config:
    """The whole tree."""

    model: ModelConfig = ModelConfig()
    cluster: ClusterConfig = ClusterConfig()
    engine: EngineConfig = EngineConfig()
    kv: KvConfig = KvConfig()
    transfer: TransferConfig = TransferConfig()
    prefill: PrefillConfig = PrefillConfig()
    router: RouterConfig = RouterConfig()
    limits: LimitsConfig = LimitsConfig()
    telemetry: TelemetryConfig = TelemetryConfig()

    def validate(self) -> "Config":
        """Self, or ConfigError with the first key that cannot be right."""
        _one_of("cluster.mode", self.cluster.mode, ("disaggregated", "aggregated"))
        _one_of("model.dtype", self.model.dtype, ("float32", "bfloat16"))
        _one_of("model.device", self.model.device, ("cpu",))
        _one_of("telemetry.log_level", self.telemetry.log_level, ("debug", "info", "warning", "error"))
        for key, plug, seam in (
            ("engine.runner", self.engine.runner, "runner"),
            ("engine.attention", self.engine.attention, "attention"),
            ("router.policy", self.router.policy, "policy"),
        ):
            _one_of(key, plug, plugs(seam))
        _one_of("transfer.transport", self.transfer.transport, ["auto", *plugs("transport")])
        for key, value, least in (
            ("cluster.routers", self.cluster.routers, 1),
            ("cluster.prefill", self.cluster.prefill, 1),
            ("cluster.decode", self.cluster.decode, 1),
            ("engine.threads", self.engine.threads, 0),
            ("engine.max_running", self.engine.max_running, 1),
            ("engine.step_tokens", self.engine.step_tokens, 1),
            ("kv.block_size", self.kv.block_size, 1),
            ("kv.blocks", self.kv.blocks, 0),
            ("kv.growth_tokens", self.kv.growth_tokens, 1),
            ("model.max_context", self.model.max_context, 0),
            ("router.queue_requests", self.router.queue_requests, 1),
            ("router.queue_prompt_tokens", self.router.queue_prompt_tokens, 1),
            ("limits.attempts", self.limits.attempts, 1),
            ("limits.body_bytes", self.limits.body_bytes, 1),
            ("transfer.frame_bytes", self.transfer.frame_bytes, 1),
        ):
            if value < least:
                raise ConfigError(f"{key} must be at least {least}, not {value}", param=key)
        for key, port in (("router.http_port", self.router.http_port), ("router.grpc_port", self.router.grpc_port)):
            if not 0 <= port <= 65535:
                raise ConfigError(f"{key} must be a port (0 to 65535), not {port}", param=key)
        for key, seconds in (
            ("transfer.lease_seconds", self.transfer.lease_seconds),
            ("transfer.park_seconds", self.transfer.park_seconds),
            ("transfer.silence_seconds", self.transfer.silence_seconds),
            ("limits.request_seconds", self.limits.request_seconds),
            ("limits.lost_seconds", self.limits.lost_seconds),
            ("limits.silent_header_seconds", self.limits.silent_header_seconds),
            ("limits.slow_client_seconds", self.limits.slow_client_seconds),
            ("limits.stuck_seconds", self.limits.stuck_seconds),
        ):
            if not 0 < seconds < math.inf:
                raise ConfigError(f"{key} must be above 0 seconds and finite, not {seconds}", param=key)
        if not 0.0 <= self.telemetry.trace_ratio <= 1.0:
            raise ConfigError(
                f"telemetry.trace_ratio must be from 0 to 1, not {self.telemetry.trace_ratio}",
                param="telemetry.trace_ratio",
            )
        if self.transfer.frame_bytes > MOST_FRAME_BYTES:
            raise ConfigError(
                f"transfer.frame_bytes must be at most {MOST_FRAME_BYTES}, not {self.transfer.frame_bytes}",
                param="transfer.frame_bytes",
            )
        parse_bytes("kv.memory", self.kv.memory)
        _tls(self.transfer)
        return self


def parse_bytes(key: str, text: str) -> int:
    """Bytes of "512MiB", "2GiB", "64KiB" or a plain number. Raises ConfigError naming `key`."""
    units = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "B": 1}
    unit = next((unit for unit in units if text.endswith(unit)), "")
    try:
        value = int(float(text.removesuffix(unit).strip()) * units.get(unit, 1))
    except (ValueError, OverflowError):
        value = 0
    if value <= 0:
        raise ConfigError(f"{key} must be a size such as 512MiB or 2GiB, not {text!r}", param=key)
    return value


def _tls(transfer: TransferConfig) -> None:
    files = {
        "transfer.tls_cert": transfer.tls_cert,
        "transfer.tls_key": transfer.tls_key,
        "transfer.tls_ca": transfer.tls_ca,
    }
    absent = [key for key, file in files.items() if not file]
    if absent and len(absent) < len(files):
        raise ConfigError(f"{absent[0]} must name a file: TLS needs {', '.join(files)}, all or none", param=absent[0])


def _one_of(key: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ConfigError(f"{key} must be one of {', '.join(allowed)}, not {value!r}", param=key)
