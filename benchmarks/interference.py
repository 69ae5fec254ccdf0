"""What a long prompt costs others: its own first gap, the streams beside it, short chats, and cancelled requests.

    python -m benchmarks.interference [--transport tcp] [--mode aggregated] [--parts gap,chats,cancels] [--json FILE]

Starts a cluster of its own: one prefill and one decode worker with a thread each, or with --mode aggregated one worker
with two threads. Prompts are random token ids, the same in each run and no two alike, so that lengths are exact and no
prefix is cached; answers have exactly as many tokens as were asked for. All times are the client's.

gap      A prompt alone: from token 1 to token 2, in medians of the other gaps of the same stream. Then streams decode
         beside such prompts: their gaps while one is computed and handed over (from its sending to its token 2), and
         between its token 1 and 2, when the last blocks arrive, against those while there is none.
chats    Short chats at random times, without and with a long prompt every now and then.
cancels  Clients that hang up: steps that a worker still began before it gave the blocks back.
"""

import argparse
import asyncio
import json
import math
import signal
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import uvloop

from benchmarks.served import Served, serving
from benchmarks.tables import Row, print_line, print_table
from contracts.errors import PdserveError

PROMPT = 1024
LONGEST = 2040
CHAT = 64
BESIDE = 4
QUIET_SECONDS = 2.0
RECOMPUTED = "pdserve_prompt_tokens_recomputed_total"
CANCEL_STEPS = "pdserve_cancel_to_stop_steps_bucket"

Tables = dict[str, list[Row]]


@dataclass(frozen=True, slots=True)
class Plan:
    """`runs` of a prompt in each part of gap. Chats come `rate` times a second for `seconds`, a long prompt every
    `every` seconds. `cancels` in each phase."""

    runs: int
    seconds: float
    rate: float
    every: float
    cancels: int


@dataclass(frozen=True, slots=True)
class Answer:
    """When the tokens of one answer came; seconds."""

    began: float
    times: Sequence[float]

    @property
    def ttft(self) -> float:
        return self.times[0] - self.began

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in pairwise(self.times)]


class Prompts:
    """Draws prompts."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)  # noqa: S311 - no secret

    def next(self, tokens: int) -> list[int]:
        """Ids of ordinary tokens."""
        return [self.random.randrange(100, 40_000) for _ in range(tokens)]


async def ask(served: Served, prompt: Sequence[int], tokens: int) -> Answer:
    """One whole answer."""
    began = time.perf_counter()
    return Answer(began, [at async for at in served.tokens(prompt, tokens)])


# gap


async def measure_gap(served: Served, plan: Plan) -> list[Row]:
    """A prompt's own first gap, and the gaps of streams beside it."""
    prompts = Prompts(1)
    await ask(served, prompts.next(PROMPT), 8)  # warms up
    alone = [await ask(served, prompts.next(PROMPT), 32) for _ in range(plan.runs)]
    first = [answer.gaps[0] for answer in alone]
    usual = [statistics.median(answer.gaps[1:]) for answer in alone]
    ratio = statistics.median(mine / other for mine, other in zip(first, usual, strict=True))
    rows = [spread("alone: medians of token 2 on", usual), spread("alone: token 1 to 2", first)]
    rows[1]["p50 of"] = ratio
    gaps, beside = await decode_beside(served, plan, prompts)
    quiet = during(gaps, [(a.began, a.times[1]) for a in beside], inside=False)
    rows.append(spread(f"{BESIDE} streams: no prompt", quiet))
    for name, spans in (
        ("prompt computed and handed over", [(a.began, a.times[1]) for a in beside]),
        ("its token 1 to 2", [(a.times[0], a.times[1]) for a in beside]),
    ):
        rows.append(compared(f"{BESIDE} streams: {name}", during(gaps, spans), quiet))
    recomputed = (await served.idle()).total(RECOMPUTED)
    return [*rows, {"what": f"prompt tokens recomputed: {recomputed:g}"}]


async def decode_beside(served: Served, plan: Plan, prompts: Prompts) -> tuple[list[tuple[float, float]], list[Answer]]:
    """All gaps of the streams, each as two times; and the prompts that came meanwhile."""
    streams: list[list[float]] = [[] for _ in range(BESIDE)]
    going = [asyncio.Event() for _ in streams]

    async def follow(times: list[float], event: asyncio.Event) -> None:
        async with aclosing(served.tokens(prompts.next(CHAT), LONGEST - CHAT)) as tokens:
            async for at in tokens:
                times.append(at)
                event.set()

    beside = []
    async with asyncio.TaskGroup() as tasks:
        following = [tasks.create_task(follow(*pair)) for pair in zip(streams, going, strict=True)]
        for event in going:
            await event.wait()
        for _ in range(plan.runs):
            await asyncio.sleep(QUIET_SECONDS)
            beside.append(await ask(served, prompts.next(PROMPT), 2))
        for task in following:
            task.cancel()
    return [gap for times in streams for gap in pairwise(times)], beside


def during(
    gaps: Sequence[tuple[float, float]], spans: Sequence[tuple[float, float]], *, inside: bool = True
) -> list[float]:
    """Seconds of the gaps that any of the spans touches, or that none does."""
    return [
        after - before
        for before, after in gaps
        if inside is any(before < end and begin < after for begin, end in spans)
    ]


# chats


async def measure_chats(served: Served, plan: Plan) -> list[Row]:
    """Without and with long prompts; chats come at the same times in both."""
    alone, _ = await chat(served, plan, prompts=Prompts(2), every=math.inf)
    await served.idle()
    beside, long = await chat(served, plan, prompts=Prompts(3), every=plan.every)
    gaps = [[gap for answer in answers for gap in answer.gaps] for answers in (alone, beside)]
    ttft = [[answer.ttft for answer in answers] for answers in (alone, beside, long)]
    return [
        spread("gaps without long prompts", gaps[0]),
        compared("gaps with long prompts", gaps[1], gaps[0]),
        spread("TTFT without long prompts", ttft[0]),
        compared("TTFT with long prompts", ttft[1], ttft[0]),
        spread("TTFT of the long prompts", ttft[2]),
    ]


async def chat(served: Served, plan: Plan, *, prompts: Prompts, every: float) -> tuple[list[Answer], list[Answer]]:
    """The answers of the chats, and of the long prompts."""
    loop, times = asyncio.get_running_loop(), Random(4)  # noqa: S311 - no secret
    began = loop.time()

    async def at(when: float, prompt: Sequence[int], tokens: int) -> Answer:
        await asyncio.sleep(began + when - loop.time())
        return await ask(served, prompt, tokens)

    chats, long, when = [], [], times.expovariate(plan.rate)
    async with asyncio.TaskGroup() as tasks:
        while when < plan.seconds:
            chats.append(tasks.create_task(at(when, prompts.next(CHAT), CHAT)))
            when += times.expovariate(plan.rate)
        when = every / 2
        while when < plan.seconds:
            long.append(tasks.create_task(at(when, prompts.next(times.randint(PROMPT, LONGEST)), 4)))
            when += every
    return [task.result() for task in chats], [task.result() for task in long]


# cancels


async def measure_cancels(served: Served, plan: Plan) -> list[Row]:
    """By phase and role, how many cancels took how many steps."""
    prompts, rows = Prompts(5), list[Row]()
    before = (await served.idle()).by(CANCEL_STEPS, "role", "le")
    phases: dict[str, Callable[[], Awaitable[None]]] = {
        "in the queue": lambda: hang_up_in_queue(served, prompts),
        "prefilling": lambda: hang_up_after(prompts.random.uniform(0.1, 1.0), ask(served, prompts.next(LONGEST), 4)),
        "at token 1": lambda: hang_up_at(served, prompts.next(PROMPT), 1),
        "at token 6": lambda: hang_up_at(served, prompts.next(PROMPT), 6),
    }
    for phase, hang_up in phases.items():
        for _ in range(plan.cancels):
            await hang_up()
            await served.idle()  # else the next one would wait in the queue for this one's last step
        after = (await served.idle()).by(CANCEL_STEPS, "role", "le")
        rows += histograms(phase, before, after)
        before = after
    return rows


async def hang_up_after(seconds: float, asking: Coroutine[Any, Any, Answer]) -> None:
    """Long before its answer is whole."""
    try:
        async with asyncio.timeout(seconds):
            await asking
    except TimeoutError:
        return


async def hang_up_in_queue(served: Served, prompts: Prompts) -> None:
    """Behind a prompt that keeps whoever computes it busy."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(ask(served, prompts.next(LONGEST), 1))
        tasks.create_task(hang_up_after(0.5, ask(served, prompts.next(LONGEST), 4)))


async def hang_up_at(served: Served, prompt: Sequence[int], last: int) -> None:
    """When so many tokens have come."""
    async with aclosing(served.tokens(prompt, 400)) as tokens:
        async for _ in tokens:
            last -= 1
            if not last:
                return


def histograms(
    phase: str, before: Mapping[tuple[str, ...], float], after: Mapping[tuple[str, ...], float]
) -> list[Row]:
    """A row for each role; no cancels where the router stopped it all by itself."""
    counts: dict[str, dict[str, float]] = {}
    for (role, bound), count in after.items():
        counts.setdefault(role, {})[bound] = count - before.get((role, bound), 0.0)
    rows = []
    for role, cumulative in counts.items():
        bounds = sorted(cumulative, key=float)
        row: Row = {"hung up": phase, "role": role, "cancels": str(round(cumulative[bounds[-1]]))}
        below = 0.0
        for bound in bounds:
            row[f"steps <= {float(bound):g}"] = str(round(cumulative[bound] - below))
            below = cumulative[bound]
        rows.append(row)
    return rows


# Figures


def spread(what: str, seconds: Sequence[float]) -> Row:
    """In milliseconds, by nearest rank; what is not there is left out."""
    row: Row = {"what": what, "n": str(len(seconds))}
    if seconds:
        ordered = sorted(seconds)
        for name, share in (("p50", 0.5), ("p99", 0.99), ("worst", 1.0)):
            row[f"{name} ms"] = 1000 * ordered[math.ceil(share * len(ordered)) - 1]
    return row


def compared(what: str, seconds: Sequence[float], baseline: Sequence[float]) -> Row:
    """The same, and how many times the baseline's p50 and p99 that is."""
    row, base = spread(what, seconds), spread("", baseline)
    for name in ("p50", "p99"):
        mine, other = row.get(f"{name} ms"), base.get(f"{name} ms")
        if isinstance(mine, float) and isinstance(other, float):
            row[f"{name} of"] = mine / other
    return row


PARTS: Mapping[str, Callable[[Served, Plan], Awaitable[list[Row]]]] = {
    "gap": measure_gap,
    "chats": measure_chats,
    "cancels": measure_cancels,
}


async def measure(
    parts: Sequence[str], plan: Plan, flags: Mapping[str, object], settings: Mapping[str, object]
) -> Tables:
    """Each part on one cluster. Prints a part when it is measured."""
    tables: Tables = {}
    async with serving(flags, settings) as served:
        for part in parts:
            tables[part] = await PARTS[part](served, plan)
            print_line(f"\n{part}")
            print_table(tables[part])
    return tables


def main() -> None:
    """Measure, print, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--mode", choices=("disaggregated", "aggregated"), default="disaggregated")
    parser.add_argument("--model", default="smollm2-135m", help="with at least 2,048 tokens of context")
    parser.add_argument("--parts", default=",".join(PARTS), help="names with commas between them")
    parser.add_argument("--runs", type=int, default=7, help="prompts of each part of gap")
    parser.add_argument("--seconds", type=float, default=75.0, help="of chats without, then of chats with long prompts")
    parser.add_argument("--rate", type=float, default=0.5, help="chats a second")
    parser.add_argument("--every", type=float, default=15.0, help="seconds between long prompts")
    parser.add_argument("--cancels", type=int, default=8, help="in each phase")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    parts = options.parts.split(",")
    if not set(parts) <= set(PARTS):
        parser.error(f"--parts are of {', '.join(PARTS)}")
    plan = Plan(options.runs, options.seconds, options.rate, options.every, options.cancels)
    threads = 2 if options.mode == "aggregated" else 1
    flags = {"model": options.model, "mode": options.mode, "prefill": 1, "decode": 1, "threads": threads}
    print_line(f"{options.model}, {options.mode}, transport {options.transport}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ended like by Ctrl-C: with its cluster
    tables: Tables = {}
    failed = ""
    try:
        tables = uvloop.run(measure(parts, plan, flags, {"transfer.transport": options.transport}))
    except* PdserveError as errors:
        failed = f"benchmarks.interference: {errors.exceptions[0]}"
    if failed:  # here, as what is raised among exception groups becomes one
        sys.exit(failed)
    if options.json is not None:
        options.json.write_text(json.dumps({"options": flags, "plan": asdict(plan), "tables": tables}, indent=1))


if __name__ == "__main__":
    main()
