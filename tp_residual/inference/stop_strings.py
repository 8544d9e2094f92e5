"""Text that ends before the first stop string, however the tokens cut it. Imports no torch."""

from collections.abc import Sequence

from tp_residual.inference.tokenizer import TokenStream


class StoppableText:
    """Ids one at a time to text, as it becomes certain that it is no part of a stop string.

    The stop string that is complete first ends the text; of several complete with the same token, the one that begins first.
    """

    def __init__(self, stream: TokenStream, stop: Sequence[str] = ()) -> None:
        self._stream, self._stop = stream, tuple(stop)
        self.text, self.stopped, self._held = "", False, ""

    def step(self, token_id: int) -> str:
        """What is now certain and was not before."""
        return self._release(self._stream.step(token_id), final=False)

    def finish(self) -> str:
        """What was held back when the ids ended. Unfinished characters may still complete a stop string."""
        return self._release(self._stream.finish(), final=True)

    def _release(self, new: str, *, final: bool) -> str:
        if self.stopped:
            return ""
        self._held += new
        found = [at for at in (self._held.find(stop) for stop in self._stop) if at >= 0]
        if found:
            end, self.stopped = min(found), True
        else:
            end = len(self._held) if final else len(self._held) - self._possible_beginning()
        released, self._held = self._held[:end], "" if self.stopped else self._held[end:]
        self.text += released
        return released

    def _possible_beginning(self) -> int:
        """The length of the longest end of the held text with which a stop string begins."""
        longest = max((len(stop) - 1 for stop in self._stop), default=0)
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0
