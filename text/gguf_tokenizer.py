"""Builds a `tokenizers` BPE tokenizer from GGUF metadata. Called by tokenizer.py."""

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

from contracts.errors import ModelError
from text.gguf_header import GgufHeader

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def build_gguf_tokenizer(header: GgufHeader) -> Tokenizer:
    """The tokenizer that `tokenizer.ggml.*` describes. Raises ModelError naming what is not supported."""
    kind = header.get("tokenizer.ggml.model", str)
    if kind != "gpt2":
        raise ModelError(f"{header.path}: tokenizer {kind!r} is not supported; supported: gpt2")
    pre = header.get("tokenizer.ggml.pre", str, "default")
    tokens: list[str] = header.get("tokenizer.ggml.tokens", list)
    types: list[int] = header.get("tokenizer.ggml.token_type", list)
    if len(types) != len(tokens):
        raise ModelError(f"{header.path}: {len(tokens)} tokens have {len(types)} token types")
    merges = [
        (left, right)
        for left, _, right in (str(merge).partition(" ") for merge in header.get("tokenizer.ggml.merges", list, []))
    ]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    try:
        model = BPE(vocab=vocabulary, merges=merges, ignore_merges=pre == "llama-bpe")
    except Exception as error:  # the library raises no narrower class
        raise ModelError(f"{header.path}: the tokenizer is damaged: {error}") from error
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = _pre_tokenizer(pre, header)
    for token, token_type in zip(tokens, types, strict=True):
        if token_type in (_UNKNOWN, _CONTROL):
            tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif token_type == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False)])
    return tokenizer


def _pre_tokenizer(pre: str, header: GgufHeader) -> PreTokenizer:
    """How text is cut before merging, by the names that llama.cpp gave to the ways."""
    if pre == "smollm":
        return Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    if pre == "gpt-2":
        return ByteLevel(add_prefix_space=False)
    if pre == "llama-bpe":
        split = Split(Regex(_LLAMA3), behavior="isolated")
        return Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])
    raise ModelError(f"{header.path}: pre-tokenizer {pre!r} is not supported; supported: gpt-2, llama-bpe, smollm")
