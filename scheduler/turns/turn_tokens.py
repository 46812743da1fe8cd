"""The tokens of a turn. Choices of one call share their prompt: a million ids are four
megabytes."""

from __future__ import annotations

from array import array


class TurnTokens:
    """The prompt, which is never changed, and the reply so far. Indices and slices are as of one
    array, but not negative."""

    __slots__ = ("_begin", "_prompt", "reply")

    def __init__(self, prompt: array[int]):
        self._prompt = prompt
        self._begin = len(prompt)
        self.reply: array[int] = array("i")

    def __len__(self) -> int:
        return self._begin + len(self.reply)

    def at(self, index: int) -> int:
        begin = self._begin
        return self._prompt[index] if index < begin else self.reply[index - begin]

    def __getitem__(self, part: slice) -> array[int]:
        start, stop, _ = part.indices(len(self))
        begin = self._begin
        if stop <= begin:
            return self._prompt[start:stop]
        if start >= begin:
            return self.reply[start - begin : stop - begin]
        return self._prompt[start:] + self.reply[: stop - begin]
