"""Finds a stop text in an answer as it arrives, in time that grows with the answer alone (Knuth, Morris and Pratt)."""

from __future__ import annotations


class StopText:
    """A stop text that is looked for. matched: how many characters of the stop text's beginning the answer ends with;
    never all of them.
    """

    def __init__(self, text: str):
        self.text, self.matched = text, 0
        self._shorter = [0] * len(text)
        """The next shorter match for the match of each length, less one."""
        for end in range(1, len(text)):
            self._shorter[end] = self._after(self._shorter[end - 1], text[end])

    def find(self, piece: str, counts: bool = True) -> int | None:
        """Read the answer's next `piece`. Returns where in it the stop text begins, below 0 if in an earlier piece, or
        None if it is not complete. counts: whether a stop text that ends in this piece is to be found.
        """
        for end, character in enumerate(piece, 1):
            self.matched = self._after(self.matched, character)
            if self.matched == len(self.text):
                self.matched = self._shorter[-1]
                if counts:
                    return end - len(self.text)
        return None

    def _after(self, matched: int, character: str) -> int:
        """Return the length of the match after one more character."""
        while matched and self.text[matched] != character:
            matched = self._shorter[matched - 1]
        return matched + (self.text[matched] == character)
