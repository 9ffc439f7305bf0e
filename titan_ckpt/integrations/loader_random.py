"""Random states by which a loader goes on: those that decide its order, and those that its data draws from.

Owns which of them a step holds. `LoaderRandom.get` has what decides an order that is drawn now: states of the process
(`random`), of the generators of the loader and its samplers (`generators`), and of samplers that give one (`samplers`).
Beside them are the generators that the data, its functions and the function that makes batches hold (`of_data`), and
the states that data with a length gives (`stated`).
Also for loaders without a position, which are beside the training's: `order_of` and `set_order`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import deepcopy
from typing import Any

import torch

from titan_ckpt.components.known.loaders import samplers_of, stated_in
from titan_ckpt.components.known.streams import functions_of
from titan_ckpt.integrations.data_order import has_state
from titan_ckpt.process import RandomState, get_random, held_generators, set_random


class LoaderRandom:
    """The random states of one loader with a position."""

    def __init__(self, loader: Any, stream: Any, *, gives_state: bool) -> None:
        """Bind to a loader. `stream`: its dataset. `gives_state`: whether it gives those of its samplers itself."""
        self._loader, self._stream, self._gives_state = loader, stream, gives_state
        self._process = RandomState()
        self.stated = [] if gives_state else stated_in(stream)
        """The datasets that give their state, and are asked for it here."""
        self.find_data()

    def find_data(self) -> None:
        """Find the generators of the data, of which an epoch or its first batch may make some."""
        self.of_data = _drawn_from(self._loader, self._stream)

    def samplers(self) -> list[Any]:
        """Return the samplers that give their state, which is set as it was before an epoch's order was drawn."""
        return [] if self._gives_state else [each for each in samplers_of(self._loader) if has_state(each)]

    def get(self) -> dict[str, Any]:
        """Return the states that decide order."""
        return {
            "random": self._process.state_dict(),
            "generators": [generator.get_state() for generator in self.generators()],
            "samplers": [sampler.state_dict() for sampler in self.samplers()],
        }

    def set(self, stored: dict[str, Any], *, within: bool = False) -> None:
        """Set them. `within`: samplers are within their orders, which they are not given anew."""
        self.set_process(stored)
        for generator, state in zip(self.generators(), stored["generators"], strict=True):
            generator.set_state(state)
        for sampler, state in zip(self.samplers(), stored["samplers"], strict=True) if not within else ():
            sampler.load_state_dict(state)

    def set_process(self, stored: dict[str, Any]) -> None:
        """Set the process's alone; of another number of ranks there are none."""
        if stored["random"] is not None:
            self._process.load_state_dict(stored["random"])

    def get_data(self) -> list[Any]:
        """Return the states that the data gives, and those of the generators that it draws from."""
        return [*(deepcopy(data.state_dict()) for data in self.stated), *map(get_random, self.of_data)]

    def set_data(self, states: Sequence[Any]) -> None:
        """Set them."""
        for data, state in zip(self.stated, states, strict=False):
            data.load_state_dict(deepcopy(state))
        for generator, state in zip(self.of_data, states[len(self.stated) :], strict=True):
            set_random(generator, state)

    def generators(self) -> list[torch.Generator]:
        """Return the generators that decide the order; one that is seeded anew for each epoch is none of them."""
        owners = [self._loader, *samplers_of(self._loader)]
        return generators_in([owner for owner in owners if not hasattr(owner, "initial_seed")])


def order_of(loader: Any) -> list[Any]:
    """Return the states of the generators by which a loader beside the training's goes on, without a position."""
    return [*map(get_random, _generators_of(loader))]


def set_order(loader: Any, states: Sequence[Any]) -> None:
    """Set what `order_of` has returned; some of the generators are made when they are used."""
    for generator, state in zip(_generators_of(loader), states, strict=False):
        set_random(generator, state)


def generators_in(owners: Collection[Any]) -> list[torch.Generator]:
    """Return the generators that loaders and samplers have, each once."""
    found = [getattr(owner, "generator", None) for owner in owners]
    return [*{id(generator): generator for generator in found if isinstance(generator, torch.Generator)}.values()]


def _generators_of(loader: Any) -> list[Any]:
    in_order = generators_in([loader, *samplers_of(loader)])
    return [*in_order, *_drawn_from(loader, getattr(loader, "dataset", None))]


def _drawn_from(loader: Any, data: Any) -> list[Any]:
    """Return the generators that a loader's data and the function that makes batches draw from."""
    return held_generators([data, *functions_of(data), getattr(loader, "collate_fn", None)])
