"""Who may import whom, and the one address of each third-party package."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.source_tree import ROOT, name, packages, sources, tree

WORKER = {"engine", "kv_transfer", "shared_state", "protos", "telemetry", "text", "contracts"}
BELOW_CLUSTER = WORKER | {"worker", "prefill_workers", "decode_workers", "router", "loadgen"}

LAYERS: dict[str, set[str]] = {
    "contracts": set(),
    "telemetry": {"contracts"},
    "text": {"contracts"},
    "protos": {"contracts"},
    "shared_state": {"contracts", "telemetry"},
    "engine": {"contracts", "telemetry", "text"},
    "kv_transfer": {"contracts", "telemetry", "protos"},
    "worker": WORKER,
    "prefill_workers": WORKER | {"worker"},
    "decode_workers": WORKER | {"worker"},
    "router": {"shared_state", "protos", "telemetry", "text", "contracts"},
    "loadgen": {"contracts", "telemetry"},
    "cluster": BELOW_CLUSTER,
    "simulator": {"cluster.local", "engine.runners", "router", "protos", "loadgen", "telemetry", "contracts"},
    "pdserve": BELOW_CLUSTER | {"cluster", "simulator"},
}

# Third-party module -> the only places that may import it.
ADDRESSES: dict[str, tuple[str, ...]] = {
    "ray": ("cluster/",),
    "redis": ("shared_state/backends/redis.py",),
    "torch": ("engine/", "kv_transfer/transports/"),
    "opentelemetry.sdk": ("telemetry/exporters.py",),
    "opentelemetry.exporter": ("telemetry/exporters.py",),
    "fastapi": ("router/http/",),
    "starlette": ("router/http/",),
    "uvicorn": ("router/http/",),
    "pydantic": ("router/http/",),
    "google.protobuf": ("protos/", "router/grpc_frontend.py"),
    "protos.pdserve": ("protos/", "router/grpc_frontend.py"),
    "grpc_health": ("protos/", "router/grpc_frontend.py"),
    "transformers": (),
}

WITHOUT_TORCH = (
    *("engine/loop.py", "engine/scheduler.py", "engine/block_manager.py", "engine/sequence.py"),
    *("engine/runners/base.py", "engine/runners/simulated.py"),
)


def imported(path: Path) -> Iterator[str]:
    """Full names of every module or member that a file imports, wherever in the file."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name(path)}:{node.lineno}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


def test_the_table_names_every_package() -> None:
    assert sorted(LAYERS) == packages()


@pytest.mark.parametrize("package", LAYERS)
def test_a_package_imports_only_what_lies_below(package: str) -> None:
    allowed = LAYERS[package] | {package}
    wrong = [
        f"{name(path)} imports {module}"
        for path in sources()
        if path.is_relative_to(ROOT / package)
        for module in imported(path)
        if any(within(module, other) for other in LAYERS) and not any(within(module, one) for one in allowed)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("module", ADDRESSES)
def test_a_dependency_has_one_address(module: str) -> None:
    wrong = [
        f"{name(path)} imports {found}"
        for path in sources()
        if not name(path).startswith(ADDRESSES[module] or ("nowhere",))
        for found in imported(path)
        if within(found, module)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("file", WITHOUT_TORCH)
def test_decisions_know_no_torch(file: str) -> None:
    assert not [module for module in imported(ROOT / file) if within(module, "torch")]


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("router.service", "torch, ray"),
        ("engine.loop", "torch"),
        ("engine.runners.simulated", "torch"),
        ("worker.session_server", "torch, ray"),
        ("pdserve.cli", "torch, ray, redis, rich.progress"),
    ],
)
def test_what_an_import_leaves_out(module: str, absent: str) -> None:
    """Transitively, in a fresh interpreter."""
    program = f"import sys, {module}; print(sorted({{*{absent.split(', ')!r}}} & {{*sys.modules}}))"
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout.strip()) == (0, "[]"), run.stderr
