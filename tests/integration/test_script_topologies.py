"""script-llama says its script on every topology and transport, alone and 32 times at once."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from contracts.requests import FinishReason
from tests.helpers.checkpoints import Script, make_script_llama
from tests.helpers.model_cluster import greedy, model_cluster, model_config
from tests.helpers.simulated_cluster import collect
from tests.integration.test_noise_topologies import LENGTHS, TOPOLOGIES

PIECES = [b"one ", b"two ", "\u9f9c".encode()[:2], "\u9f9c".encode()[2:], b" three"]
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Script]:
    directory = tmp_path_factory.mktemp("script")
    return directory, make_script_llama(directory, PIECES, ending="filler")


@pytest.mark.parametrize("step_tokens", [7, 512])
@pytest.mark.parametrize("topology", TOPOLOGIES)
async def test_the_script_is_said(topology: str, step_tokens: int, model: tuple[Path, Script]) -> None:
    directory, script = model
    rest = NEW_TOKENS - len(script.token_ids)
    ids = [*script.token_ids, *(3 * script.ending_ids)[:rest]]
    options: dict[str, Any] = TOPOLOGIES[topology]

    async with model_cluster(model_config(directory, step_tokens=step_tokens, **options)) as cluster:

        async def ask(length: int) -> None:
            tokens = await collect(cluster, greedy([7] * length, NEW_TOKENS))
            assert [token.token_id for token in tokens] == ids
            assert "".join(token.text for token in tokens).startswith("one two \u9f9c three")
            assert tokens[-1].finish is FinishReason.LENGTH

        for _ in ("cold", "warm"):
            for length in LENGTHS:
                await ask(length)
        await asyncio.gather(*(ask(LENGTHS[index % len(LENGTHS)]) for index in range(32)))
