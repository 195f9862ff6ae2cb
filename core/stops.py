"""The text of one request as it comes, and the strings that end it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from core.sampling import SamplingParams
    from core.tokenizer import Tokenizer


class StopStrings:
    """Looks for strings in a growing text, and holds back what may still become one of them.

    The match that is complete first counts; of those that are complete at once the one that began
    first. So what is found hangs on the text alone, not on the pieces in which it comes.
    """

    def __init__(self, strings: Seq[str], keep: bool) -> None:
        """`keep`: the text ends with the string that was found, and not before it."""
        self._strings, self._keep = strings, keep
        self._held = ""
        self.found: str | None = None

    def push(self, text: str, watched: bool) -> str:
        """The text that `text` decides, "" after a string was found. Only a watched one ends it."""
        if self.found is not None or not self._strings:
            return "" if self.found else text
        known, both = len(self._held), self._held + text
        matches = []
        for string in self._strings if watched else ():
            start = both.find(string, max(0, known - len(string) + 1))
            if start >= 0:
                matches.append((start + len(string), start, string))
        if matches:
            end, start, self.found = min(matches)
            return both[: end if self._keep else start]
        cut = len(both) - max((_overlap(both, string) for string in self._strings), default=0)
        self._held = both[cut:]
        return both[:cut]

    def flush(self) -> str:
        """What is held back, at the end of the text."""
        return self._held if self.found is None else ""


def _overlap(text: str, string: str) -> int:
    """Length of the longest end of `text` that begins `string` and is shorter than it."""
    longest = min(len(string) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(string[:n])), 0)


class RequestText:
    """The visible text of a request: decoded from ids, cut at a stop string."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._decode = tokenizer.incremental()
        self._stops = StopStrings(params.stop, params.include_stop_str_in_output)
        self._parts: list[str] = []
        self._num_taken = 0

    @property
    def stopped(self) -> bool:
        """A stop string has ended the text."""
        return self._stops.found is not None

    def push(self, ids: Seq[int], *, watched: bool, final: bool = False) -> None:
        """Add the text of `ids`, the last ones if `final`; stop strings count where `watched`."""
        text = self._stops.push(self._decode(ids, final), watched)
        self._parts.append(text + self._stops.flush() if final else text)

    def delta(self) -> str:
        """The decided text since the last call."""
        fresh, self._num_taken = self._parts[self._num_taken :], len(self._parts)
        return "".join(fresh)

    def whole(self) -> str:
        return "".join(self._parts)
