"""Finds stop strings in streamed text. Used per sequence by the engine's output code."""

from contracts.errors import InvalidRequest


class StopMatcher:
    """Passes text on until the first stop string is complete; `include`: that string is passed on too.

    The text is read character by character, and the first character that completes a stop string ends it;
    of several that end there the longest counts. So the result does not depend on how the text was cut into
    pieces, and no token after a complete stop string is ever waited for. Held back is only the longest tail
    that is a proper prefix of a stop string. Knuth-Morris-Pratt, one automaton a stop string: time is linear
    in the text however long the stop strings are.

    Raises InvalidRequest for an empty stop string.
    """

    def __init__(self, stops: tuple[str, ...], include: bool) -> None:
        if not all(stops):
            raise InvalidRequest("a stop string must not be empty", param="stop")
        self._automata = [_Automaton(stop) for stop in stops]
        self._include = include
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text that is safe to show, whether a stop string was found). After a find nothing more is pushed."""
        if not self._automata:
            return text, False
        for index, char in enumerate(text):
            found = max([automaton.length for automaton in self._automata if automaton.feed(char)], default=0)
            if found:
                shown = self._held + text[: index + 1]
                self._held = ""
                return shown if self._include else shown[: len(shown) - found], True
        pending = self._held + text
        safe = len(pending) - max(automaton.matched for automaton in self._automata)
        self._held = pending[safe:]
        return pending[:safe], False

    def flush(self) -> str:
        """At the end of the output: what was held back for a stop string that did not come."""
        held, self._held = self._held, ""
        return held


class _Automaton:
    """`matched`: length of the longest suffix of the text that is a prefix of the stop string."""

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._fallback = [0]  # [i]: longest proper prefix of stop[: i + 1] that is also its suffix
        self.length = len(stop)
        self.matched = 0
        for char in stop[1:]:
            self._fallback.append(self._step(self._fallback[-1], char))

    def feed(self, char: str) -> bool:
        """Read one character; whether the stop string is complete with it."""
        self.matched = self._step(self.matched, char)
        return self.matched == self.length

    def _step(self, matched: int, char: str) -> int:
        while matched and self._stop[matched] != char:
            matched = self._fallback[matched - 1]
        return matched + (self._stop[matched] == char)
