"""The position of a run in its data, as a component: by data-parallel rank, also when their number has changed.

Owns the rule which rank continues from which position. Only the dataloader knows what a position is.

Ranks that read the same data (tensor-parallel and pipeline peers) are one data-parallel rank. A dataloader names its
data-parallel rank by the attributes `dp_rank` and `dp_world_size`, as torchtitan's do; without them every rank reads
data of its own. A dataloader that can divide its data among a new number of ranks has, beside `load_state_dict`, a
method

    def load_state_dicts(self, state_dicts: Sequence[dict[str, Any]]) -> None

which gets the results of `state_dict()` on each of the old data-parallel ranks, in their order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from titan_ckpt.components.items.item import DataRank, FlatFolder, Item, Leaves, Stored, flattened, nested
from titan_ckpt.components.known.loaders import generators_beside, is_of_torchdata
from titan_ckpt.components.known.stateful_loader import begin_at, epochs_of, state_of, told_samplers
from titan_ckpt.components.known.streams import begin_once
from titan_ckpt.errors import CorruptCheckpointError, ExportError, LoadMismatchError, counted, listed
from titan_ckpt.process import get_random
from titan_ckpt.types import StateDict, Stateful

_RANK = "dp_rank_"
"""torchtitan's name of a data-parallel rank's position."""
_DRAWN, _EPOCHS = "titan_ckpt_generators", "titan_ckpt_epochs"
"""Names under which the position of a StatefulDataLoader has what its own state leaves out: states of generators, and
the epochs of samplers that are told them."""


class DataPosition(Item):
    """The dataloader's state on each data-parallel rank."""

    component = "dataloader"
    scope = "share"
    kind = object

    def __init__(self, dataloader: Stateful, data_rank: Callable[[], DataRank]) -> None:
        """Bind to a dataloader. `data_rank`: returns the share that this process reads, which a loader may change."""
        self._dataloader, self._data_rank = dataloader, data_rank
        if is_of_torchdata(dataloader):
            dataloader.snapshot_every_n_steps = 1  # type: ignore[attr-defined]  # see begin_afresh

    def value(self, tensors: StateDict) -> Any:
        state = state_of(self._dataloader)
        beside = {
            _DRAWN: [*map(get_random, generators_beside(self._dataloader))],
            _EPOCHS: epochs_of(self._dataloader),
        }
        beside = {name: values for name, values in beside.items() if values}
        return {**state, **beside} if beside else state

    def check(self, stored: Stored) -> None:
        """Raises: LoadMismatchError if the dataloader cannot divide the stored positions among this run's ranks."""
        positions, size = stored.values[self.key], self._data_rank().size
        if len(positions) != size and not callable(getattr(self._dataloader, "load_state_dicts", None)):
            raise LoadMismatchError(
                f"the checkpoint has the data positions of {len(positions)} data-parallel ranks, this run has "
                f"{size}, and {type(self._dataloader).__name__} cannot divide them anew: give it "
                "load_state_dicts(state_dicts), which gets the old ranks' states in their order; resume with "
                f"{len(positions)} data-parallel ranks; or start the data afresh: checkpoint.resume.exclude = "
                '["dataloader"]'
            )
        is_torchdata = is_of_torchdata(self._dataloader) and len(positions) == size
        position = positions[self._data_rank().rank] if is_torchdata else {}
        before = position.get(_DRAWN)
        if before and len(before) != len(found := generators_beside(self._dataloader)):
            raise LoadMismatchError(
                f"the checkpoint's StatefulDataLoader draws from {counted(len(before), 'random generator')} of its "
                f"data and collate_fn, this run's from {len(found)}: make them in constructors, or start the data "
                'afresh: checkpoint.resume.exclude = ["dataloader"]'
            )
        epochs = position.get(_EPOCHS)
        if epochs and len(epochs) != len(told := told_samplers(self._dataloader)):
            raise LoadMismatchError(
                f"the checkpoint's StatefulDataLoader has {counted(len(epochs), 'sampler')} with set_epoch(), this "
                f"run's has {len(told)}: use the same samplers, or start the data afresh: checkpoint.resume.exclude = "
                '["dataloader"]'
            )

    def restore(self, stored: Stored, tensors: StateDict) -> None:
        positions, dataloader = stored.values[self.key], self._dataloader
        if len(positions) != self._data_rank().size:
            dataloader.load_state_dicts(positions)  # type: ignore[attr-defined]
            return
        state = positions[self._data_rank().rank]
        if is_of_torchdata(dataloader):
            for sampler, epoch in zip(told_samplers(dataloader), state.get(_EPOCHS, ()), strict=False):
                sampler.set_epoch(epoch)
            own = {name: value for name, value in state.items() if name not in (_DRAWN, _EPOCHS)}
            begin_at(dataloader, own, state.get(_DRAWN))
        else:
            dataloader.load_state_dict(state)
        begin_once(dataloader)

    def leaves(self) -> Leaves:
        """Raises: ExportError for a position that is not stored by data-parallel rank."""
        state, own = state_of(self._dataloader), self._data_rank()
        known = {f"{_RANK}{own.rank}", "world_size"}
        if own.size > 1 and state.keys() != known:
            raise ExportError(
                f"the data position has {listed(sorted(map(str, state)), ', ', ' ')}, expected "
                f"{', '.join(sorted(known))}: a DCP folder stores each name once, so each data-parallel rank needs its "
                "own"
            )
        yield from flattened((self.component,), state)

    def from_torchtitan(self, folder: FlatFolder) -> list[Any] | None:
        """Return each data-parallel rank's state of torchtitan's dataloader, its bytes as they are; None without it.

        Raises: CorruptCheckpointError if a rank's is missing.
        """
        state = nested(folder, self.component)
        if not state:
            return None
        size = state.get("world_size")
        ranks = [f"{_RANK}{rank}" for rank in range(size if type(size) is int and size < 1 << 20 else 0)]
        lost = [f"dataloader.{name}" for name in ranks if name not in state]
        if lost or not ranks:
            raise CorruptCheckpointError(
                f"{folder.path}: its data position lacks {listed(lost or ['dataloader.world_size'], ', ')}. "
                'To start the data afresh: checkpoint.resume.exclude = ["dataloader"]',
                str(folder.path),
            )
        return [{name: state[name], "world_size": size} for name in ranks]
