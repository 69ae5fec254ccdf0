"""Token ids to text, one token at a time. Used per sequence by the engine's output code."""

import codecs

from text.tokenizer import Tokenizer


class Detokenizer:
    """Decodes UTF-8 incrementally: bytes of a character that is not complete are held back.

    All pushed texts and the flushed one together equal the decoding of all bytes at once, with one U+FFFD
    for each maximal invalid piece (Unicode Standard, chapter 3.9). The cost of a token does not depend on
    how many came before.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that has become complete with this token."""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """At the end of the output: U+FFFD when a character was cut, else ""."""
        return self._decoder.decode(b"", final=True)
