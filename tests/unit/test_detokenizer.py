"""Characters that are split over tokens, and outputs that are cut inside one."""

from pathlib import Path

import pytest

from contracts.config import ModelConfig
from tests.helpers.text_models import write_hf_model
from text.detokenizer import Detokenizer
from text.model_resolver import resolve_model
from text.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    """Every byte is a token of its own."""
    return load_tokenizer(resolve_model(ModelConfig(name=str(write_hf_model(tmp_path))), lambda line: None))


@pytest.mark.parametrize(
    "text",
    [
        "\U0001fae0ok",
        "\u9f9c",
        "\u010f",
        "\U0001f468\u200d\U0001f469\u200d\U0001f467",
        "\U0001f1e8\U0001f1ff",
        "\ufffd",
    ],
)
def test_split_characters_come_out_whole(tokenizer: Tokenizer, text: str) -> None:
    detokenizer = Detokenizer(tokenizer)
    shown = [detokenizer.push(token_id) for token_id in tokenizer.encode(text, control_tokens=False)]
    assert [piece for piece in shown if piece] == list(text)  # each with its last byte, nothing before
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_a_cut_character_is_one_replacement(tokenizer: Tokenizer, kept: int) -> None:
    detokenizer = Detokenizer(tokenizer)
    ids = tokenizer.encode("\U0001fae0", control_tokens=False)[:kept]
    assert [detokenizer.push(token_id) for token_id in ids] == [""] * kept
    assert (detokenizer.flush(), detokenizer.flush()) == ("\ufffd", "")


def test_control_tokens_and_foreign_ids_add_nothing_even_inside_a_character(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    first, second = tokenizer.encode("\u010f", control_tokens=False)
    assert [detokenizer.push(token_id) for token_id in (first, 1, 319, second)] == ["", "", "", "\u010f"]
