"""One request, one trace, over the real router, prefill and decode processes, as a collector receives it."""

import secrets

import grpc
import pytest

from protos.pdserve.v1 import inference_pb2, inference_pb2_grpc
from tests.helpers.otlp_collector import CollectedSpan
from tests.helpers.real_cluster import eventually
from tests.integration.conftest import NoiseCluster

pytestmark = pytest.mark.cluster

PROMPT = list(range(8, 108))
SPANS = {
    "pdserve.request": "router",
    "pdserve.queue": "router",
    "pdserve.placement": "router",
    "pdserve.prefill": "prefill",
    "pdserve.kv_export": "prefill",
    "pdserve.decode": "decode",
    "pdserve.kv_transfer": "decode",
}


@pytest.mark.parametrize("way", ["http", "grpc"])
async def test_one_request_is_one_trace(noise_cluster: NoiseCluster, way: str) -> None:
    trace_id, caller = secrets.token_hex(16), secrets.token_hex(8)
    await ask(noise_cluster, way, f"00-{trace_id}-{caller}-01")

    spans = await collected(noise_cluster, trace_id)

    assert {name: span.resource["pdserve.role"] for name, span in spans.items()} == SPANS
    assert {span.error for span in spans.values()} == {""}
    assert spans["pdserve.request"].parent == caller
    inside = {span.span_id for span in spans.values()}
    assert all(span.parent in inside for name, span in spans.items() if name != "pdserve.request")
    pids = {span.resource["pdserve.role"]: span.resource["process.pid"] for span in spans.values()}
    assert len(set(pids.values())) == 3
    chunks = [attributes for name, attributes in spans["pdserve.prefill"].events if name == "chunk"]
    assert len(chunks) > 1
    assert sum(chunk["tokens"] for chunk in chunks) + cached(spans["pdserve.prefill"]) == len(PROMPT)
    assert spans["pdserve.kv_transfer"].attributes["blocks"] > 0
    assert spans["pdserve.kv_transfer"].attributes["bytes"] > 0


async def test_a_request_without_a_caller_has_a_trace_of_its_own(noise_cluster: NoiseCluster) -> None:
    seen = len(noise_cluster.collector.spans)
    await ask(noise_cluster, "http", "")
    await ask(noise_cluster, "grpc", "")

    async def roots() -> list[str]:
        return [span.trace_id for span in noise_cluster.collector.spans[seen:] if span.name == "pdserve.request"]

    first, second = await eventually(roots, lambda found: len(found) == 2)
    assert first != second
    assert set(await collected(noise_cluster, first)) == set(await collected(noise_cluster, second)) == set(SPANS)


async def ask(cluster: NoiseCluster, way: str, traceparent: str) -> None:
    """A prompt that no cache holds."""
    prompt = [8 + byte for byte in secrets.token_bytes(len(PROMPT))]
    headers = {"traceparent": traceparent} if traceparent else {}
    if way == "http":
        async with cluster.real.client() as client:
            body = {"model": "noise", "prompt": prompt, "max_tokens": 8, "ignore_eos": True}
            answer = await client.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == 200, answer.text
        return
    async with grpc.aio.insecure_channel(f"127.0.0.1:{cluster.real.grpc_port}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]  # generated
        request = inference_pb2.GenerateRequest(token_ids={"ids": prompt}, max_tokens=8, ignore_eos=True)
        assert [answer async for answer in stub.Generate(request, metadata=tuple(headers.items()))]


async def collected(cluster: NoiseCluster, trace_id: str) -> dict[str, CollectedSpan]:
    """The spans of a whole trace, by name."""

    async def spans() -> dict[str, CollectedSpan]:
        return {span.name: span for span in cluster.collector.spans if span.trace_id == trace_id}

    return await eventually(spans, lambda found: set(found) >= set(SPANS))


def cached(prefill: CollectedSpan) -> int:
    """Prompt tokens that the prefill worker had already."""
    (found,) = [attributes["cached_tokens"] for name, attributes in prefill.events if "cached_tokens" in attributes]
    return int(found)
