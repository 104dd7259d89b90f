"""Stop strings in a text that arrives in pieces.

The match is that which ends first; of those that end together, that which starts first (the
longest). So it depends on the text only, not on how the text is cut into pieces: no later piece can
bring a match that ends earlier.
"""

from collections.abc import Sequence


class StopMatcher:
    """Shows a text up to its first stop string.

    Text is withheld while it could still be the beginning of a stop string, and no longer. What is
    shown is the text before the stop string, all of it; what follows the stop string is dropped.

    Attributes:
        matched: the stop string found, or None.
    """

    def __init__(self, stop: str | Sequence[str], include_stop_str_in_output: bool = False):
        """Raises ValueError if a stop string is empty or not a string.

        Args:
            stop: one or several stop strings; none matches nothing.
            include_stop_str_in_output: show the stop string too.
        """
        self.stop = (stop,) if isinstance(stop, str) else tuple(stop)
        for string in self.stop:
            if not isinstance(string, str) or not string:
                raise ValueError(
                    f"stop={list(self.stop)!r} holds {string!r}, which can end no text: give "
                    "strings of at least one character."
                )
        self.include_stop_str_in_output = include_stop_str_in_output
        self.matched: str | None = None
        self._withheld = ""

    def add(self, piece: str, *, may_stop: bool = True) -> str:
        """The text that is safe to show after `piece`; "" after a match.

        A match that ends in a piece that may not stop does not count; one that only begins there
        does.
        """
        if self.matched is not None:
            return ""
        text = self._withheld + piece
        # no match lies in the withheld text alone, so the first found of a string is its earliest
        found = [(at + len(s), at, s) for s in self.stop if (at := text.find(s)) >= 0]
        if found and may_stop:
            end, start, self.matched = min(found)
            self._withheld = ""
            return text[: end if self.include_stop_str_in_output else start]
        safe = len(text) - self._pending(text)
        self._withheld = text[safe:]
        return text[:safe]

    def flush(self) -> str:
        """What was withheld, as the text has ended; "" after a match."""
        text, self._withheld = self._withheld, ""
        return text

    def _pending(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = 0
        for string in self.stop:
            for length in range(min(len(string) - 1, len(text)), longest, -1):
                if text.endswith(string[:length]):
                    longest = length
                    break
        return longest
