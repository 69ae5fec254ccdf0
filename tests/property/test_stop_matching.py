"""The stop matcher against a search over the whole text."""

from hypothesis import given
from hypothesis import strategies as st

from text.stops import StopMatcher

STOPS = st.lists(st.text("abc", min_size=1, max_size=5), max_size=4).map(tuple)


def expected(text: str, stops: tuple[str, ...], include: bool) -> tuple[str, bool]:
    """By definition: the first end of any stop string; of those that end there, the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[:end] if include else text[: end - max(map(len, found))], True
    return text, False


@given(pieces=st.lists(st.text("abc", max_size=6), max_size=12), stops=STOPS, include=st.booleans())
def test_pieces_make_no_difference(pieces: list[str], stops: tuple[str, ...], include: bool) -> None:
    matcher = StopMatcher(stops, include)
    shown, stopped = "", False
    for piece in pieces:
        text, stopped = matcher.push(piece)
        shown += text
        if stopped:
            break
    shown += matcher.flush()
    assert (shown, stopped) == expected("".join(pieces), stops, include)


@given(text=st.text("abc", max_size=40), stops=STOPS)
def test_only_a_proper_prefix_of_a_stop_is_held_back(text: str, stops: tuple[str, ...]) -> None:
    matcher = StopMatcher(stops, include=False)
    shown, stopped = matcher.push(text)
    if not stopped:
        prefixes = {stop[:length] for stop in stops for length in range(len(stop))} | {""}
        assert text[len(shown) :] == max((tail for tail in prefixes if text.endswith(tail)), key=len)
