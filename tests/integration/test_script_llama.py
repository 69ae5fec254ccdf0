"""script-llama says its script, in the torch runner and in transformers."""

from pathlib import Path

import pytest

from contracts.config import ModelConfig
from tests.helpers.checkpoints import EOS, START, make_script_llama
from tests.helpers.oracle import Oracle
from tests.helpers.torch_engine import BLOCK_SIZE, generate, load_runner, token_ids
from text.model_resolver import resolve_model
from text.tokenizer import load_tokenizer

SCRIPT: list[bytes | str] = [b"\xf0", b"\x9f", b"\xab", b"\xa0", b"ok", b" and", "<|im_end|>", b"."]


@pytest.mark.parametrize("ending", ["eos", "filler"])
async def test_it_says_the_script_and_ends(tmp_path: Path, ending: str) -> None:
    script = make_script_llama(tmp_path, SCRIPT, "eos" if ending == "eos" else "filler")
    spoken = list(script.token_ids + script.ending_ids)
    assert spoken[-1] == EOS or len(script.ending_ids) == 4
    again = list(script.ending_ids if ending == "filler" else script.token_ids)
    expected = (spoken + again)[: len(spoken) + 3]
    runner = load_runner(tmp_path)
    prompts = [[START], [260, 40, START], [*range(8, 8 + 3 * BLOCK_SIZE), START]]
    for drawn in await generate(runner, prompts, len(expected), chunk=7):
        assert token_ids(drawn) == expected
    await runner.close()
    run = Oracle(tmp_path).greedy([START], len(expected))
    assert run.tokens == expected
    assert run.gaps.min() > 50


def test_its_tokenizer_and_end_tokens(tmp_path: Path) -> None:
    script = make_script_llama(tmp_path, SCRIPT)
    files = resolve_model(ModelConfig(name=str(tmp_path)), lambda line: None)
    tokenizer = load_tokenizer(files)
    assert b"".join(map(tokenizer.token_bytes, script.token_ids)).decode() == "\U0001fae0ok and."
    assert tokenizer.encode("ok<|im_end|>", control_tokens=True) == [8 + ord("o"), 8 + ord("k"), 4]
    assert tokenizer.vocab_size == files.metadata.vocab_size
    assert files.metadata.eos_ids == {1, 2, 4}  # config.json, generation_config.json, tokenizer_config.json


def test_a_token_cannot_stand_twice(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="twice"):
        make_script_llama(tmp_path, [b"a", b"bc", b"a"])
    with pytest.raises(ValueError, match="twice"):
        make_script_llama(tmp_path, [b"bc", b"bc"])
