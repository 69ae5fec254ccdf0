"""What a load run found: rates, percentiles and errors, as a table or as JSON."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

from loadgen.client import Sample


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Seconds, by nearest rank."""

    p50: float
    p99: float


@dataclass(frozen=True, slots=True)
class BenchReport:
    """`seconds` is the whole run; tokens are those of requests that succeeded. Percentiles are over these
    requests (`inter_token`: over all their gaps), None where nothing was measured. `errors`: how often
    by kind (see Sample.error)."""

    requests: int
    succeeded: int
    errors: dict[str, int]
    seconds: float
    prompt_tokens: int
    output_tokens: int
    requests_per_second: float
    output_tokens_per_second: float
    ttft: Percentiles | None
    tpot: Percentiles | None
    inter_token: Percentiles | None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        return asdict(self)

    def table(self) -> str:
        """For people; times in milliseconds."""
        rows = [
            ("requests", f"{self.succeeded} of {self.requests} in {self.seconds:.1f} s"),
            *((f"  failed: {kind}", str(times)) for kind, times in self.errors.items()),
            ("requests/s", f"{self.requests_per_second:.2f}"),
            ("prompt tokens", str(self.prompt_tokens)),
            ("output tokens", str(self.output_tokens)),
            ("output tokens/s", f"{self.output_tokens_per_second:.1f}"),
        ]
        for name, found in (("TTFT", self.ttft), ("TPOT", self.tpot), ("inter-token", self.inter_token)):
            text = f"{found.p50 * 1000:10.1f} {found.p99 * 1000:10.1f}" if found else f"{'-':>10} {'-':>10}"
            rows.append((f"{name} p50 p99 (ms)", text))
        return "\n".join(f"{name:<24}{value}" for name, value in rows)


def summarize(samples: Sequence[Sample], seconds: float) -> BenchReport:
    """The report of a run that took `seconds`."""
    good = [sample for sample in samples if not sample.error]
    tokens = sum(sample.tokens for sample in good)
    return BenchReport(
        requests=len(samples),
        succeeded=len(good),
        errors=dict(Counter(sample.error for sample in samples if sample.error).most_common()),
        seconds=seconds,
        prompt_tokens=sum(sample.prompt_tokens for sample in good),
        output_tokens=tokens,
        requests_per_second=len(good) / seconds if seconds else 0.0,
        output_tokens_per_second=tokens / seconds if seconds else 0.0,
        ttft=_percentiles(sample.ttft for sample in good),
        tpot=_percentiles(sample.tpot for sample in good),
        inter_token=_percentiles(gap for sample in good for gap in sample.gaps),
    )


def _percentiles(values: Iterable[float | None]) -> Percentiles | None:
    ordered = sorted(value for value in values if value is not None)
    if not ordered:
        return None
    p50, p99 = (ordered[ceil(share * len(ordered) / 100) - 1] for share in (50, 99))
    return Percentiles(p50, p99)
