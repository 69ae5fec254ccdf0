"""Names and labels of the metrics; bounded labels; gauges read at the scrape; the merged text."""

from collections.abc import Iterable

import pytest
from prometheus_client.parser import text_string_to_metric_families

from contracts.workers import BlockCounts
from telemetry.merge import merge_expositions
from telemetry.metrics import RouterMetrics, WorkerMetrics

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(text: str) -> Samples:
    """Every sample of an exposition; fails when one comes twice."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found
            found[key] = sample.value
    return found


def value(text: str, name: str, **labels: str) -> float:
    return samples(text)[name, frozenset(labels.items())]


def worker(counts: BlockCounts | None = None) -> WorkerMetrics:
    metrics = WorkerMetrics()
    pool = counts or BlockCounts(used=1, pinned=2, reserved=3, cached=4, free=5)
    metrics.bind(lambda: pool, lambda: 6, lambda: 7, lambda: 8)
    return metrics


def test_worker_counts() -> None:
    metrics = worker()
    metrics.kv_moved("grpc", blocks=3, size=3000, busy=1.5)
    metrics.kv_transferred(0.02)
    metrics.transfer_failed("corrupt")
    metrics.audit_failed()
    metrics.prefilled(100)
    metrics.recomputed(16)
    metrics.cached(32)
    metrics.generated(5)
    metrics.first_token()
    metrics.preempted()
    metrics.step("forward", 0.5)
    metrics.cancel_stopped(1)
    metrics.request_finished("stop")
    metrics.dropped_message()
    text = metrics.exposition()
    assert value(text, "pdserve_kv_transfer_bytes_total", transport="grpc") == 3000
    assert value(text, "pdserve_kv_transfer_blocks_total") == 3
    assert value(text, "pdserve_kv_transfer_seconds_count") == 1
    assert value(text, "pdserve_transfer_failures_total", code="corrupt") == 1
    assert value(text, "pdserve_audit_failures_total") == 1
    assert value(text, "pdserve_prefill_tokens_total") == 100
    assert value(text, "pdserve_prompt_tokens_recomputed_total") == 16
    assert value(text, "pdserve_cached_tokens_total") == 32
    assert value(text, "pdserve_generated_tokens_total") == 5
    assert value(text, "pdserve_first_tokens_total") == 1
    assert value(text, "pdserve_preemptions_total") == 1
    assert value(text, "pdserve_step_seconds_sum", part="forward") == 0.5
    assert value(text, "pdserve_cancel_to_stop_steps_bucket", le="1.0") == 1
    assert value(text, "pdserve_cancel_to_stop_steps_bucket", le="0.0") == 0
    assert value(text, "pdserve_requests_finished_total", outcome="stop") == 1
    assert value(text, "pdserve_dropped_messages_total") == 1
    assert "_created" not in text


def test_gauges_are_read_at_each_scrape() -> None:
    metrics, running = WorkerMetrics(), [1]
    counts = [BlockCounts(used=0, pinned=0, reserved=0, cached=0, free=9)]
    metrics.bind(lambda: counts[0], lambda: running[0], lambda: 0, lambda: 0)
    assert value(metrics.exposition(), "pdserve_kv_blocks", state="free") == 9
    assert value(metrics.exposition(), "pdserve_requests_running") == 1
    counts[0], running[0] = BlockCounts(used=4, pinned=0, reserved=0, cached=0, free=5), 2
    assert value(metrics.exposition(), "pdserve_kv_blocks", state="free") == 5
    assert value(metrics.exposition(), "pdserve_kv_blocks", state="used") == 4
    assert value(metrics.exposition(), "pdserve_requests_running") == 2


def test_router_counts() -> None:
    metrics = RouterMetrics()
    metrics.bind(lambda: 2, lambda: 3, lambda: {"prefill": 1, "decode": 0}, lambda: 500)
    metrics.request_finished("stop", 1.5)
    metrics.request_finished("deadline_exceeded", 9.0)
    metrics.ttft(0.1)
    metrics.tpot(0.02)
    metrics.inter_token(0.03)
    metrics.queue_wait("placed", 0.0)
    metrics.queue_wait("gave_up", 2.0)
    metrics.refused("overloaded")
    metrics.attempt_failed("worker_lost")
    metrics.dropped_message()
    text = metrics.exposition()
    assert value(text, "pdserve_router_requests_total", outcome="stop") == 1
    assert value(text, "pdserve_router_requests_total", outcome="deadline_exceeded") == 1
    assert value(text, "pdserve_request_seconds_sum") == 10.5
    assert value(text, "pdserve_time_to_first_token_seconds_sum") == 0.1
    assert value(text, "pdserve_time_per_output_token_seconds_sum") == 0.02
    assert value(text, "pdserve_inter_token_seconds_sum") == 0.03
    assert value(text, "pdserve_queue_seconds_count", outcome="placed") == 1
    assert value(text, "pdserve_queue_seconds_sum", outcome="gave_up") == 2
    assert value(text, "pdserve_refused_total", reason="overloaded") == 1
    assert value(text, "pdserve_attempt_failures_total", code="worker_lost") == 1
    assert value(text, "pdserve_dropped_messages_total") == 1
    assert value(text, "pdserve_queue_requests") == 2
    assert value(text, "pdserve_router_running") == 3
    assert value(text, "pdserve_workers", role="decode") == 0
    assert value(text, "pdserve_queue_prompt_tokens") == 500


def test_label_values_are_bounded_and_nothing_raises() -> None:
    worker_metrics, router_metrics = worker(), RouterMetrics()
    before = len(samples(worker_metrics.exposition())) + len(samples(router_metrics.exposition()))
    for n in range(1000):
        name = f"unknown-{n}"
        worker_metrics.kv_moved(name, -1, -5, -1.0)
        worker_metrics.request_finished(name)
        worker_metrics.transfer_failed(name)
        worker_metrics.step(name, float("nan"))
        router_metrics.request_finished(name, -1.0)
        router_metrics.refused(name)
        router_metrics.attempt_failed(name)
    after = len(samples(worker_metrics.exposition())) + len(samples(router_metrics.exposition()))
    assert after == before
    assert value(router_metrics.exposition(), "pdserve_refused_total", reason="other") == 1000
    assert value(worker_metrics.exposition(), "pdserve_kv_transfer_blocks_total") == 0


def test_two_objects_share_nothing() -> None:
    one, two = worker(), worker()
    one.first_token()
    assert value(two.exposition(), "pdserve_first_tokens_total") == 0


def test_merged_text_is_valid_and_labelled() -> None:
    router, decode, prefill = RouterMetrics(), worker(), WorkerMetrics()
    router.bind(lambda: 0, lambda: 0, lambda: {"prefill": 1, "decode": 1})
    prefill.bind(lambda: BlockCounts(0, 0, 0, 0, 77), lambda: 0, lambda: 0, lambda: 0)
    decode.kv_moved("grpc", 1, 10, 0.1)
    names = (("router", "router-0"), ("decode", "decode-0"), ("prefill", 'pre"fill\\0'))
    labels = [{"role": role, "worker": name} for role, name in names]
    text = merge_expositions(zip(labels, [m.exposition() for m in (router, decode, prefill)], strict=True))
    assert value(text, "pdserve_kv_blocks", role="decode", worker="decode-0", state="pinned") == 2
    assert value(text, "pdserve_kv_blocks", role="prefill", worker='pre"fill\\0', state="free") == 77
    assert value(text, "pdserve_leases", role="decode", worker="decode-0") == 8
    assert value(text, "pdserve_kv_transfer_bytes_total", role="decode", worker="decode-0", transport="grpc") == 10
    # A label that a sample has already is kept.
    assert value(text, "pdserve_workers", role="decode", worker="router-0") == 1
    for family in {line.split()[2] for line in text.splitlines() if line.startswith("#")}:
        assert text.count(f"# HELP {family} ") == text.count(f"# TYPE {family} ") == 1
    every = sum(len(samples(m.exposition())) for m in (router, decode, prefill))
    assert len(samples(text)) == every


@pytest.mark.parametrize(
    ("parts", "merged"),
    [
        ([], ""),
        ([({}, "# HELP a b\n# TYPE a gauge\na 1.0\n")], "# HELP a b\n# TYPE a gauge\na 1.0\n"),
        (
            [
                ({"w": "x\n"}, '# TYPE a gauge\na{l="{w=\\"1"} 1.0\n'),
                ({"w": "y"}, "\n# comment\n# TYPE a gauge\na 2.0\n"),
            ],
            '# TYPE a gauge\na{w="x\\n",l="{w=\\"1"} 1.0\na{w="y"} 2.0\n',
        ),
    ],
)
def test_merge_of_lines(parts: Iterable[tuple[dict[str, str], str]], merged: str) -> None:
    assert merge_expositions(parts) == merged
