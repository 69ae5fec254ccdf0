"""The text of the real model against transformers reading the same file."""

import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

from contracts.config import ModelConfig
from tests.helpers.text_models import is_control
from text.detokenizer import Detokenizer
from text.model_resolver import ModelFiles, resolve_model
from text.text_processor import TextProcessor

pytestmark = pytest.mark.model

TEXTS = [
    "",
    "Hello, world! It's 1,234.56 o'clock; they'll've gone.",
    "def f(x):\n\tif x  ==  1:\n        return [i for i in range(10)]\n\n\n# done   \n",
    "\U0001fae0\U0001f468\u200d\U0001f469\u200d\U0001f467\U0001f1e8\U0001f1ff \U0001f600ok",
    "\u9f9c\u304c\u597d\u304d\u3067\u3059\u3002\ud55c\uad6d\uc5b4 \u4f60\u597d\uff0c\u4e16\u754c",
    "\u017dlu\u0165ou\u010dk\u00fd k\u016f\u0148 \u00fap\u011bl \u010f\u00e1belsk\u00e9 \u00f3dy",
    "2024-12-31 007 3.14159 1e-5 \u0664\u0665 \u00bd \u2167",
    " leading, trailing ",
    "   \t\t \n\n \r\n  end",
    "<|im_start|>system\nx<|im_end|>\n<|endoftext|><repo_name>a<|im_",
    "\x00\x01\x7f\u00a0\u00ad\u2028\ufeff\ufffd",
    "word " * 500,
]


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    return resolve_model(ModelConfig(cache_dir=os.environ.get("PDSERVE_CACHE", "")), lambda line: None)


@pytest.fixture(scope="module")
def text(files: ModelFiles) -> TextProcessor:
    return TextProcessor(files)


@pytest.fixture(scope="module")
def oracle(files: ModelFiles) -> Iterator[Any]:
    """transformers' tokenizer, with the model's own cutting: its GGUF import forgets that digits come apart."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoTokenizer  # noqa: PLC0415 - takes seconds, and only this test needs it

        loaded = AutoTokenizer.from_pretrained(files.path.parent, gguf_file=files.path.name)
        loaded.backend_tokenizer.pre_tokenizer = Sequence(
            [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
        )
        yield loaded


def test_metadata(files: ModelFiles) -> None:
    found = files.metadata
    assert (found.name, found.model_type, found.layers, found.vocab_size) == ("smollm2-135m", "llama", 30, 49152)
    assert (found.heads, found.kv_heads, found.head_dim, found.max_context) == (9, 3, 64, 8192)
    assert (found.bos_id, found.eos_ids, found.add_bos, found.tie_embeddings) == (1, frozenset({2}), False, True)


@pytest.mark.parametrize("sample", TEXTS)
def test_encoding_and_decoding_equal_transformers(text: TextProcessor, oracle: Any, sample: str) -> None:
    ids = text.tokenizer.encode(sample, control_tokens=True)
    assert ids == oracle(sample, add_special_tokens=False).input_ids
    detokenizer = Detokenizer(text.tokenizer)
    shown = "".join(map(detokenizer.push, ids)) + detokenizer.flush()
    assert shown == oracle.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sample=st.text(max_size=80))
def test_any_text_equals_transformers(text: TextProcessor, oracle: Any, sample: str) -> None:
    assert text.tokenizer.encode(sample, control_tokens=True) == oracle(sample, add_special_tokens=False).input_ids


def test_every_token_has_the_bytes_that_transformers_decodes(text: TextProcessor, oracle: Any) -> None:
    differing = [
        token_id
        for token_id in range(text.metadata.vocab_size)
        if not is_control(text.tokenizer, token_id)
        and text.tokenizer.token_text(token_id)
        != oracle.backend_tokenizer.decoder.decode([oracle.convert_ids_to_tokens(token_id)])
    ]
    assert differing == []


def test_chat_prompt_equals_transformers(text: TextProcessor, oracle: Any) -> None:
    messages = [
        {"role": "user", "content": "What is 2 + 2?  \n\nBe brief."},
        {"role": "assistant", "content": "4 \U0001fae0"},
        {"role": "user", "content": "Thanks!"},
    ]
    expected = oracle.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert text.template.prompt_ids(messages) == expected


def test_a_character_that_the_vocabulary_splits(text: TextProcessor) -> None:
    detokenizer = Detokenizer(text.tokenizer)
    ids = text.tokenizer.encode("\U0001fae0", control_tokens=False)
    assert len(ids) > 1
    assert [detokenizer.push(token_id) for token_id in ids] == [""] * (len(ids) - 1) + ["\U0001fae0"]
