"""Stop strings across pieces, inside pieces, near misses, and odd values."""

import pytest

from contracts.errors import InvalidRequest
from text.stops import StopMatcher


def run(stops: tuple[str, ...], pieces: list[str], include: bool = False) -> tuple[list[str], bool]:
    """What each piece made visible (the flush last, when nothing stopped), and whether a stop was found."""
    matcher = StopMatcher(stops, include)
    shown: list[str] = []
    for piece in pieces:
        text, stopped = matcher.push(piece)
        shown.append(text)
        if stopped:
            assert matcher.flush() == ""
            return shown, True
    return [*shown, matcher.flush()], False


def test_stop_that_spans_pieces_is_never_shown() -> None:
    shown, stopped = run(("DEFGHIJ",), ["A", "BC", "DEF", "G", "HI", "J", "K"])
    assert (shown, stopped) == (["A", "BC", "", "", "", ""], True)


def test_near_miss_releases_what_was_held() -> None:
    shown, stopped = run(("DEFGHIJ",), ["A", "BC", "DEF", "G", "HI", "X"])
    assert (shown, stopped) == (["A", "BC", "", "", "", "DEFGHIX", ""], False)


def test_held_text_comes_out_at_the_end() -> None:
    assert run(("stop",), ["please st"]) == (["please ", "st"], False)


def test_near_miss_releases_only_what_can_no_longer_match() -> None:
    assert run(("aab",), ["a", "a", "a", "b"]) == (["", "", "a", ""], True)


@pytest.mark.parametrize(("include", "expected"), [(False, "please"), (True, "pleasestop")])
def test_stop_that_ends_inside_a_piece(include: bool, expected: str) -> None:
    shown, stopped = run(("stop",), ["please", "stop!", "more"], include)
    assert ("".join(shown), stopped, len(shown)) == (expected, True, 2)


@pytest.mark.parametrize("stops", [("ab", "abc"), ("abc", "ab")])
@pytest.mark.parametrize("pieces", [["xabcd"], ["xa", "bcd"], ["x", "a", "b", "c"]])
@pytest.mark.parametrize(("include", "expected"), [(False, "x"), (True, "xab")])
def test_of_two_stops_the_first_complete_one_wins(
    stops: tuple[str, ...], pieces: list[str], include: bool, expected: str
) -> None:
    shown, stopped = run(stops, pieces, include)
    assert ("".join(shown), stopped) == (expected, True)


def test_of_two_stops_that_end_together_the_longer_counts() -> None:
    assert run(("c", "bc"), ["abc"]) == (["a"], True)


@pytest.mark.parametrize("pieces", [["a stop or end"], list("a stop or end")])
def test_of_two_stops_in_one_text_the_earlier_wins(pieces: list[str]) -> None:
    shown, stopped = run(("end", "stop"), pieces)
    assert ("".join(shown), stopped) == ("a ", True)


def test_without_stops_everything_passes() -> None:
    assert run((), ["anything", "", "goes"]) == (["anything", "", "goes", ""], False)


def test_very_long_stop_string() -> None:
    stop = "a" * 10_000 + "b"
    shown, stopped = run((stop,), ["a"] * 10_100 + ["b"])
    assert ("".join(shown), stopped) == ("a" * 100, True)


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidRequest) as raised:
        StopMatcher(("x", ""), include=False)
    assert raised.value.param == "stop"
