"""Any bytes, token by token, are the same text as all of them at once."""

from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from text.detokenizer import Detokenizer
from text.tokenizer import Tokenizer


class ListedBytes:
    """Token i adds the i-th piece."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces

    def token_bytes(self, token_id: int) -> bytes:
        return self._pieces[token_id]


LEADS = st.sampled_from([b"\xf0\x9f", b"\xab", b"\xa0", b"\xe9\xbe", b"\x9c", b"\xc4", b"\x8f", b"\xff", b"ok", b""])


@given(pieces=st.lists(st.binary(max_size=5) | LEADS | st.text(max_size=3).map(str.encode), max_size=30))
def test_concatenation_equals_whole_decoding(pieces: list[bytes]) -> None:
    detokenizer = Detokenizer(cast("Tokenizer", ListedBytes(pieces)))
    shown = "".join(detokenizer.push(index) for index in range(len(pieces)))
    data = b"".join(pieces)
    assert data.decode(errors="replace").startswith(shown)
    assert shown + detokenizer.flush() == data.decode(errors="replace")
