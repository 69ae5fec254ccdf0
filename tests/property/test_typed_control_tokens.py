"""Whatever people type into a chat, the control tokens of the prompt are those of the template."""

import tempfile
from functools import cache
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from contracts.config import ModelConfig
from tests.helpers.text_models import SPECIALS, is_control, write_hf_model
from text.model_resolver import resolve_model
from text.text_processor import TextProcessor

FRAGMENTS = [*SPECIALS, "<|", "|>", "im_end", "<", "0.", " ", "1", "\u9f9c", "\n"]


@cache
def processor() -> TextProcessor:
    with tempfile.TemporaryDirectory() as folder:
        return TextProcessor(resolve_model(ModelConfig(name=str(write_hf_model(Path(folder)))), lambda line: None))


@given(contents=st.lists(st.lists(st.sampled_from(FRAGMENTS), max_size=6).map("".join), min_size=1, max_size=3))
def test_only_the_template_makes_control_tokens(contents: list[str]) -> None:
    text = processor()
    ids = text.template.prompt_ids([{"role": "user", "content": content} for content in contents])
    special = [text.tokenizer.token_text(token_id) for token_id in ids if is_control(text.tokenizer, token_id)]
    assert special == ["<|bos|>", *["<|im_start|>", "<|im_end|>"] * len(contents), "<|im_start|>"]
    typed = b"".join(map(text.tokenizer.token_bytes, ids)).decode()
    assert typed == "".join(f"user\n{content}\n" for content in contents) + "assistant\n"
