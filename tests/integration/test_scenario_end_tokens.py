"""End tokens: the union of three files' ids; ignored, masked and never shown, on prefill's token as on decode's."""

from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.helpers.answers import CHAT_WAYS, WAYS, ask, settled
from tests.helpers.checkpoints import EOS, EOT, IM_END, START, make_script_llama
from tests.helpers.model_cluster import model_config, served_cluster

ENDS = {"<|eos|>": EOS, "<|eot|>": EOT, "<|im_end|>": IM_END}
"""In config.json and generation_config.json, in the latter only, in tokenizer_config.json only."""


@pytest.mark.parametrize("at", [1, 2, 3], ids=["first", "second", "third"])
@pytest.mark.parametrize("end", ENDS)
async def test_each_of_them_ends_the_text(end: str, at: int, tmp_path: Path) -> None:
    make_script_llama(tmp_path, [*[b"a", b"b"][: at - 1], end, b"c", b"d"], "filler")
    said = "ab"[: at - 1]
    async with served_cluster(model_config(tmp_path)) as served:
        for way in WAYS + CHAT_WAYS:
            prompt: Any = [START] if way in WAYS else "hi"
            answer = await ask(served, way, prompt, max_tokens=8, temperature=0)
            assert (answer.text, answer.finish, answer.completion_tokens) == (said, "stop", at)
            on = await ask(served, way, prompt, max_tokens=at + 2, temperature=0, ignore_eos=True)
            assert (on.text, on.finish, on.completion_tokens) == (said + "cd", "length", at + 2)
            stopped = await ask(served, way, prompt, max_tokens=9, temperature=0, ignore_eos=True, stop=["cd"])
            assert (stopped.text, stopped.finish) == (said, "stop")
        await settled(served)


@pytest.mark.parametrize("topology", [{}, {"aggregated": True}])
@pytest.mark.parametrize("at", [1, 2])
async def test_a_minimum_masks_them(at: int, topology: dict[str, Any], tmp_path: Path) -> None:
    """Where the script wants to end, another token is drawn, until the minimum is reached."""
    make_script_llama(tmp_path, [*[b"a", b"b"][: at - 1], "<|eot|>", b"c"], "filler")
    async with served_cluster(model_config(tmp_path, **topology)) as served:
        for way in WAYS:
            for minimum in (5, 6):
                answer = await ask(served, way, [START], max_tokens=20, temperature=0, min_tokens=minimum)
                assert answer.finish == "stop"
                assert answer.completion_tokens > minimum
                if way == "grpc":
                    assert not set(answer.token_ids[:-1]) & set(ENDS.values())
                    assert answer.token_ids[-1] == EOT
            none = await ask(served, way, [START], max_tokens=20, temperature=0, min_tokens=at - 1)
            assert none.completion_tokens == at
        await settled(served)


async def test_a_single_id_and_absent_files(tmp_path: Path) -> None:
    """One id instead of a list, none in generation_config.json, and no such file."""
    for changes in ({"eos_token_id": EOT}, {"eos_token_id": None}, None):
        directory = tmp_path / str(changes)
        make_script_llama(directory, [b"a", "<|eot|>", b"b", "<|eos|>", b"c"], "filler")
        path = directory / "generation_config.json"
        if changes is None:
            path.unlink()
        else:
            path.write_bytes(orjson.dumps(orjson.loads(path.read_bytes()) | changes))
        async with served_cluster(model_config(directory)) as served:
            answer = await ask(served, "whole", [START], max_tokens=9, temperature=0)
            assert answer.text == ("a" if changes == {"eos_token_id": EOT} else "ab")
