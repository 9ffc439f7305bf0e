"""PartMemory: memory of parts that are being sent, which is used again when the client has let go of a part.

Fresh memory takes longer to touch than to fill, so an upload has as much as it has parts in flight, and no more.
"""

from __future__ import annotations

import queue
import weakref

import numpy as np
import numpy.typing as npt

from titan_ckpt.disk.memory import Buffer


class PartMemory:
    """At most `num_parts` buffers of `part_bytes`. One thread takes them; any may let them go."""

    def __init__(self, part_bytes: int, num_parts: int) -> None:
        """Allocate nothing yet."""
        self._part_bytes = part_bytes
        self._num_unmade = num_parts
        self._free: queue.SimpleQueue[Buffer] = queue.SimpleQueue()  # its `put` may interrupt any call, even its own
        self._lent: dict[int, weakref.ref[npt.NDArray[np.uint8]]] = {}

    def take(self, num_bytes: int) -> memoryview:
        """Return memory for a part. It is lent again when nobody has this view, or another one of it, any more.

        Waits while all parts are in use, as they are until the client has their answers.
        """
        if self._num_unmade and self._free.empty():
            self._num_unmade -= 1
            buffer = Buffer.allocate(self._part_bytes)
        else:
            buffer = self._free.get()
        owner = np.frombuffer(buffer.view[:num_bytes], np.uint8)  # all views of it keep it alive
        self._lent[buffer.address] = weakref.ref(owner, lambda _: self._free.put(buffer))
        return owner.data
