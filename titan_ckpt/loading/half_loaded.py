"""The mark of a run whose live state a load has begun to overwrite and has not finished.

Owns when the mark is set and taken off, and the refusal to keep a state that is a mixture. Loads nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from titan_ckpt.errors import HalfLoadedError, LoadMismatchError, counted, listed


class HalfLoaded:
    """The mark of one run: set before the first live byte changes, taken off when a load has succeeded on all ranks."""

    def __init__(self) -> None:
        self._source: str | None = None
        self._overwritten: set[str] = set()
        self._filled: set[str] = set()

    def __bool__(self) -> bool:
        return self._source is not None

    def begin(self, source: str, names: Iterable[str]) -> None:
        """Set the mark. `names`: the live tensors that are about to be overwritten from `source`.

        Every rank calls it before any rank overwrites anything.
        """
        self._source, self._filled = source, set()
        self.overwrite(names)

    def overwrite(self, names: Iterable[str]) -> None:
        """Note more tensors that are about to be overwritten by the load that began last."""
        self._filled.update(names)
        self._overwritten |= self._filled

    def check_replaced(self) -> None:
        """Check that the load that has filled its tensors replaced all that earlier, failed ones overwrote.

        Raises: LoadMismatchError naming the tensors that it left as they are.
        """
        if left := sorted(self._overwritten - self._filled):
            raise LoadMismatchError(
                f"the load of {self._source} replaced all but {len(left)} of the tensors that a failed load before it "
                f"had overwritten: {listed(left, ', ', ' ')}. Start the process again, and load {self._source} first"
            )

    def end(self) -> None:
        """Take off the mark. Every rank calls it after all ranks have loaded."""
        self._source = None
        self._overwritten, self._filled = set(), set()

    def refuse(self, what: str) -> None:
        """Raise HalfLoadedError while the mark is set. `what`: the sentence that the error begins with."""
        if self._source is not None:
            raise HalfLoadedError(
                f"{what}: the load of {self._source} began to overwrite this run and did not succeed on all ranks, so "
                f"the state in memory is a mixture ({counted(len(self._overwritten), 'tensor')} on this rank). Call "
                "load() again until it succeeds, or start the process again",
                self._source,
                sorted(self._overwritten),
            )
