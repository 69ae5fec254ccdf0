"""From a vocabulary entry to the bytes that it adds to the output.

Called by tokenizer.py. Two spellings exist: byte-level BPE, in which each character stands for one byte, and
the SentencePiece style, in which U+2581 stands for a space and <0xXX> for a byte.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

from contracts.errors import ModelError

Spelling = Callable[[str], bytes]
"""Bytes of an ordinary vocabulary entry."""

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SENTENCEPIECE = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


def byte_level() -> Spelling:
    """Byte-level BPE: the table of GPT-2 (`bytes_to_unicode` in openai/gpt-2). Printable characters of
    Latin-1 stand for themselves, the other bytes for U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    table = {byte: byte for byte in printable} | {0x100 + index: byte for index, byte in enumerate(others)}

    def spell(token: str) -> bytes:
        if all(ord(char) in table for char in token):
            return token.translate(table).encode("latin-1")
        return token.encode()  # no spelling of bytes: the text itself

    return spell


def sentencepiece() -> Spelling:
    """SentencePiece style with byte fallback."""

    def spell(token: str) -> bytes:
        byte = _BYTE.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ").encode()

    return spell


def spelling_of(tokenizer: Tokenizer, source: Path) -> Spelling:
    """The spelling that the decoder of a tokenizer.json undoes. Raises ModelError naming a decoder that is
    neither of the two."""
    if tokenizer.decoder is None:
        raise ModelError(f"{source} has no decoder")
    decoder = json.loads(tokenizer.decoder.__getstate__())
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = {step["type"] for step in steps}
    if kinds == {"ByteLevel"}:
        return byte_level()
    if kinds & {"Replace", "Metaspace"} and kinds <= _SENTENCEPIECE:
        return sentencepiece()
    raise ModelError(f"{source}: the decoder {', '.join(sorted(kinds))} is not supported")
