"""What a step of the engine does outside the model's forward, at 16 sequences and two context lengths.

    python -m benchmarks.engine [--model smollm2-135m] [--sequences 16] [--steps 60]

Prints the median milliseconds of each part of a step, and the sum outside the forward. Runs the real engine
loop, scheduler, block manager and runner; only the worker around them is missing.
"""

import argparse
import asyncio
import statistics
from dataclasses import replace

from cluster.nodes import load_model
from contracts.config import Config, EngineConfig, KvConfig, ModelConfig
from contracts.errors import PdserveError
from contracts.kv import BlockHasher
from contracts.requests import AttemptKey, SamplingParams
from engine.block_manager import BlockManager
from engine.loop import Advance, EngineLoop, StepReport
from engine.output import OutputProcessor
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from text.model_resolver import resolve_model

PARTS = ("schedule", "tensors", "sampling", "commit", "deliver")


class Recorder:
    """A StepSink that keeps the reports of pure decode steps."""

    def __init__(self, sequences: int, steps: int) -> None:
        self._sequences = sequences
        self._steps = steps
        self.reports: list[StepReport] = []
        self.enough = asyncio.Event()

    def admitted(self, sequence: Sequence) -> None:
        """Nothing to do."""

    def delivered(self, advances: list[Advance]) -> None:
        """Nothing to do."""

    def failed(self, sequence: Sequence, error: PdserveError) -> None:
        raise error

    def stepped(self, report: StepReport) -> None:
        """Count a step in which every sequence decodes one token."""
        if report.rows == report.tokens == self._sequences:
            self.reports.append(report)
            if len(self.reports) == self._steps:
                self.enough.set()


async def measure(config: Config, context: int, temperature: float, sequences: int, steps: int) -> list[StepReport]:
    """Reports of `steps` decode steps of `sequences` sequences that start at `context` tokens."""
    text, runner = await asyncio.to_thread(load_model, config, resolve_model(config.model, print_line))
    blocks = BlockManager(runner.store.blocks)
    size = config.kv.block_size
    scheduler = Scheduler(blocks, block_size=size, step_tokens=config.engine.step_tokens, max_running=sequences)
    recorder = Recorder(sequences, steps)
    engine = EngineLoop(runner, scheduler, blocks, recorder)
    hasher = BlockHasher(b"", size, "benchmark")
    for number in range(sequences):
        sampling = SamplingParams(max_tokens=steps + 200, seed=number, temperature=temperature, ignore_eos=True)
        engine.add(
            Sequence(
                AttemptKey(str(number), 1),
                tuple((number * 31 + i * 7) % 40_000 + 100 for i in range(context)),
                sampling,
                OutputProcessor(text.tokenizer, text.metadata.eos_ids, sampling),
                hasher=hasher,
                salt="",
                block_size=size,
                one_token=False,
            )
        )
    stepping = asyncio.create_task(engine.run())
    await recorder.enough.wait()
    stepping.cancel()
    await asyncio.wait({stepping})
    await runner.close()
    return recorder.reports


def print_line(line: str) -> None:
    """Progress for people."""
    print(line, flush=True)  # noqa: T201 - a benchmark's output


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    config = replace(
        Config(),
        model=ModelConfig(name=options.model),
        engine=EngineConfig(threads=options.threads, max_running=options.sequences),
        kv=KvConfig(memory="6GiB"),
    )
    print_line("| context | sampling | " + " | ".join(PARTS) + " | outside forward | forward |")
    print_line("|---|---|" + "---|" * (len(PARTS) + 2))
    for context in (64, 1024):
        for name, temperature in (("greedy", 0.0), ("temperature 1", 1.0)):
            reports = asyncio.run(measure(config, context, temperature, options.sequences, options.steps))
            parts = [1000 * statistics.median(getattr(report, part) for report in reports) for part in PARTS]
            outside = 1000 * statistics.median(sum(getattr(r, part) for part in PARTS) for r in reports)
            forward = 1000 * statistics.median(report.forward for report in reports)
            row = " | ".join(f"{value:.2f}" for value in (*parts, outside, forward))
            print_line(f"| {context} | {name} | {row} |")


if __name__ == "__main__":
    main()
