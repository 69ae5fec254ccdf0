"""Text to token ids, and token ids to the bytes that they add to the output.

Router (prompts), engine (output) and tests use the one Tokenizer. It knows no chat template and never
touches the network.
"""

import hashlib

import tokenizers

from contracts.errors import InvalidRequest, ModelError
from text.gguf_header import read_gguf_header
from text.gguf_tokenizer import build_gguf_tokenizer
from text.model_resolver import ModelFiles
from text.token_pieces import Spelling, byte_level, spelling_of


class Tokenizer:
    """Immutable after construction; all methods may be called from any thread.

    `vocab_size` counts the tokenizer's ids, which may be fewer than the model's: ids above them add no text.
    `fingerprint` is equal for equal tokenizers. `control_literals`: texts of the control tokens.
    """

    def __init__(self, backend: tokenizers.Tokenizer, spell: Spelling) -> None:
        backend.no_truncation()
        backend.no_padding()
        definition = backend.to_str()
        self._honouring = backend
        self._plain = tokenizers.Tokenizer.from_str(definition)
        self._plain.encode_special_tokens = True  # reads: encode them as ordinary text
        self.fingerprint = hashlib.blake2b(definition.encode(), digest_size=16).hexdigest()
        added = backend.get_added_tokens_decoder()
        texts = {token_id: token for token, token_id in backend.get_vocab().items()}
        texts.update({token_id: token.content for token_id, token in added.items()})
        special = frozenset(token_id for token_id, token in added.items() if token.special)
        self.control_literals = tuple(sorted(texts[token_id] for token_id in special))
        self.vocab_size = max(texts, default=-1) + 1
        self._bytes = [b""] * self.vocab_size
        for token_id, text in texts.items():
            if token_id not in special:
                self._bytes[token_id] = text.encode() if token_id in added else spell(text)
        self._special_texts = {token_id: texts[token_id] for token_id in special}

    def encode(self, text: str, control_tokens: bool) -> list[int]:
        """Ids of `text`; nothing is added in front or behind.

        `control_tokens` True: literals of control tokens become these tokens. False: they are text like any
        other. Raises InvalidRequest for text that is not valid Unicode.
        """
        backend = self._honouring if control_tokens else self._plain
        try:
            # the batch call of one text computes no offsets and holds no interpreter lock
            (encoding,) = backend.encode_batch_fast([text], add_special_tokens=False)
        except TypeError as error:  # a lone surrogate has no UTF-8
            raise InvalidRequest("the text is not valid Unicode (lone surrogate)") from error
        ids: list[int] = encoding.ids
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to the output: b"" for control tokens and ids without a token."""
        return self._bytes[token_id] if 0 <= token_id < self.vocab_size else b""

    def token_text(self, token_id: int) -> str:
        """The token for human eyes: a control token's literal, else its bytes with U+FFFD where they are no
        whole character."""
        special = self._special_texts.get(token_id)
        return self.token_bytes(token_id).decode(errors="replace") if special is None else special


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """The tokenizer of a model. Raises ModelError when it is damaged, of an unknown kind, or larger than the
    model's vocabulary."""
    if files.kind == "gguf":
        tokenizer = Tokenizer(build_gguf_tokenizer(read_gguf_header(files.path)), byte_level())
    else:
        path = files.path / "tokenizer.json"
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises no narrower class
            raise ModelError(f"{path} is not a valid tokenizer: {error}") from error
        tokenizer = Tokenizer(backend, spelling_of(backend, path))
    if tokenizer.vocab_size > files.metadata.vocab_size:
        raise ModelError(
            f"{files.path}: the tokenizer has {tokenizer.vocab_size} tokens, "
            f"the model's vocabulary only {files.metadata.vocab_size}"
        )
    return tokenizer
