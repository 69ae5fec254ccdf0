"""The README's examples and the commands that it names, against a real cluster of the real model."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.real_cluster import RealCluster

pytestmark = [pytest.mark.cluster, pytest.mark.model]

_ASK = Path("README.md").read_text(encoding="utf-8").partition("## Ask")[2].partition("\n## ")[0]
EXAMPLES = re.findall(r"^```(\w+)\n(.*?)^```", _ASK, re.MULTILINE | re.DOTALL)


def test_there_are_three_examples() -> None:
    assert [language for language, _ in EXAMPLES] == ["sh", "python", "python"]


@pytest.mark.parametrize(("language", "code"), EXAMPLES, ids=["curl", "openai", "grpc"])
def test_an_example(smollm2_cluster: RealCluster, language: str, code: str) -> None:
    ported = code.replace(":8000", f":{smollm2_cluster.http_port}").replace(":8001", f":{smollm2_cluster.grpc_port}")
    assert ported != code
    command = ["sh", "-ec", ported] if language == "sh" else [sys.executable, "-W", "error", "-c", ported]
    done = subprocess.run(
        command, env=smollm2_cluster.shell.environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"[a-z]{3}", done.stdout)


def test_status(smollm2_cluster: RealCluster) -> None:
    done = smollm2_cluster.shell.run("status")
    head, *rows = [line.split() for line in done.stdout.splitlines()]
    assert head == ["id", "role", "state", "address", "pid", "incarnation"]
    assert [row[:3] for row in rows] == [
        ["decode-0", "decode", "ready"],
        ["prefill-0", "prefill", "ready"],
        ["router-0", "router", "ready"],
    ]
    assert rows[-1][3] == f"127.0.0.1:{smollm2_cluster.http_port}"


def test_bench(smollm2_cluster: RealCluster) -> None:
    options = ["--requests", "4", "--concurrency", "2", "--input-tokens", "8", "--output-tokens", "4"]
    done = smollm2_cluster.shell.run("bench", "--url", smollm2_cluster.url, "--api-key", "none", *options)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^requests +4 of 4 in ", done.stdout, re.MULTILINE)
    assert re.search(r"^output tokens +16$", done.stdout, re.MULTILINE)
    for name in ("TTFT", "TPOT", "inter-token"):
        assert re.search(rf"^{name} p50 p99 \(ms\) +\d+\.\d +\d+\.\d$", done.stdout, re.MULTILINE), done.stdout
    assert "4/4" in done.stderr


def test_a_second_start_in_the_namespace_is_refused(smollm2_cluster: RealCluster) -> None:
    done = smollm2_cluster.shell.run("up", "--http-port", "0", "--grpc-port", "0")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(
        f"pdserve: namespace 'pdserve' already runs as process {smollm2_cluster.process.pid};"
    )
    assert done.stderr.count("\n") == 1


def test_a_port_in_use_is_refused(smollm2_cluster: RealCluster) -> None:
    http, grpc = str(smollm2_cluster.http_port), str(smollm2_cluster.grpc_port)
    for ports, purpose, taken in (
        (["--http-port", http, "--grpc-port", "0"], "HTTP", http),
        (["--http-port", "0", "--grpc-port", grpc], "gRPC", grpc),
    ):
        done = smollm2_cluster.shell.run("up", "--set", "cluster.namespace=second", *ports)
        assert done.returncode == 1
        assert done.stderr == f"pdserve: cannot listen for {purpose} on 127.0.0.1:{taken}: Address already in use\n"
        assert [path.name for path in smollm2_cluster.shell.cache.glob("run/*")] == ["pdserve.json"]


def test_doctor(smollm2_cluster: RealCluster) -> None:
    busy = smollm2_cluster.shell.run("doctor", "--set", f"router.http_port={smollm2_cluster.http_port}")
    assert busy.returncode == 1
    lines = busy.stdout.splitlines()
    (failure,) = [line for line in lines if not line.startswith("ok ")]
    assert failure.startswith(f"FAIL  ports: 127.0.0.1:{smollm2_cluster.http_port} cannot be bound")
    passed = {line.split(":")[0].removeprefix("ok").strip() for line in lines if line != failure}
    others = {
        "python",
        "packages",
        "torch",
        "cache",
        "model",
        "memory",
        "shared memory",
        "open files",
        "valkey",
        "links",
        "ray",
    }
    assert passed == others
