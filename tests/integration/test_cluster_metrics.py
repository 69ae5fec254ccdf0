"""The router's /metrics speaks for every process of a real cluster."""

import pytest

from tests.integration.conftest import NoiseCluster

pytestmark = pytest.mark.cluster

WORKERS = {("prefill", "prefill-0"), ("prefill", "prefill-1"), ("decode", "decode-0"), ("decode", "decode-1")}
OF_EACH_WORKER = [
    "pdserve_requests_running",
    "pdserve_requests_waiting",
    "pdserve_leases",
    "pdserve_audit_failures_total",
    "pdserve_generated_tokens_total",
    "pdserve_step_seconds_count",
]
OF_THE_ROUTER = [
    "pdserve_time_to_first_token_seconds",
    "pdserve_time_per_output_token_seconds",
    "pdserve_inter_token_seconds",
]


async def test_the_metrics_of_the_whole_cluster(noise_cluster: NoiseCluster) -> None:
    real = noise_cluster.real
    await real.idle(*(worker for _, worker in WORKERS))
    prompt = list(range(8, 208))
    async with real.client() as client:
        before = await real.metrics()
        for start in range(4):
            body = {"model": "noise", "prompt": prompt[start:], "max_tokens": 6, "ignore_eos": True}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
        assert (await client.get("/metrics")).headers["content-type"].startswith("text/plain; version=0.0.4")
    await real.idle(*(worker for _, worker in WORKERS))
    after = await real.metrics()

    for name in OF_EACH_WORKER:
        assert {(labels["role"], labels["worker"]) for labels in after.labels(name)} == WORKERS, name
    for role, worker in WORKERS:
        states = {
            labels["state"]: after("pdserve_kv_blocks", **labels)
            for labels in after.labels("pdserve_kv_blocks")
            if (labels["role"], labels["worker"]) == (role, worker)
        }
        assert set(states) == {"free", "used", "cached", "pinned", "reserved"}
        assert sum(states.values()) == 2048
    for name in OF_THE_ROUTER:
        (count,) = after.labels(f"{name}_count")
        assert (count["role"], count["worker"]) == ("router", "router-0")
        assert after(f"{name}_count") > before(f"{name}_count")
        assert after(f"{name}_bucket", le="+Inf") == after(f"{name}_count")
    moved = {"name": "pdserve_kv_transfer_bytes_total", "transport": "shared_memory"}
    assert after(**moved) > (before.get(**moved) or 0.0)
    assert all("role" in labels and "worker" in labels for labels in after.labels(moved["name"]))
