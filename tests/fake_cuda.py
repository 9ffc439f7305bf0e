"""Tensors that say they are on a CUDA device, and a runtime that writes down what it is asked for.

torch itself stays as it is: values lie in host memory and every copy is made at once. What is tested with it is the
order of calls and the thread that makes them, not CUDA.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

DEVICE = torch.device("cuda", 1)
"""The device of this rank. New threads have device 0, as with CUDA."""


class OnDevice(torch.Tensor):
    """Host memory that says it is not, so that it takes a device's way."""

    is_cpu = False
    is_cuda = True
    device = DEVICE


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(OnDevice)


class Stream:
    """A stream of a device."""

    def __init__(self, cuda: FakeCuda, device: torch.device, name: str) -> None:
        self._cuda, self.device, self.name = cuda, device, name

    def wait_stream(self, other: Stream) -> None:
        self._cuda.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Event) -> None:
        self._cuda.log.append(f"{self.name} waits for an event")

    def record_event(self, event: Event) -> Event:
        self._cuda.events.append(event)
        return event

    def synchronize(self) -> None:
        self._cuda.log.append(f"the host waits for {self.name}")


class Event:
    """An event that has come when the test opens its gate."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda

    def record(self, _: Stream) -> None:
        self._cuda.events.append(self)

    def query(self) -> bool:
        return self._cuda.gate.is_set()

    def synchronize(self) -> None:
        assert self._cuda.gate.wait(60)


class FakeCuda:
    """Replaces what this package calls of torch.cuda."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        """The calling thread is the one that trains: its device is DEVICE, on a stream of its own."""
        self.log: list[str] = []
        self.events: list[Event] = []
        self.gate = threading.Event()
        self.gate.set()
        self.registered: dict[int, int] = {}
        self.refused_at = -1
        """Number of the registration that is refused."""
        self._threads = threading.local()
        self.set_stream(Stream(self, DEVICE, "training"))
        for name, value in {
            "is_initialized": lambda: True,
            "cudart": lambda: self,
            "current_stream": lambda device=None: self.stream,
            "set_stream": self.set_stream,
            "Stream": lambda device: Stream(self, device, "side"),
            "Event": lambda **_: Event(self),
        }.items():
            patch.setattr(torch.cuda, name, value)

    @property
    def stream(self) -> Any:
        """The current stream of the calling thread."""
        return getattr(self._threads, "stream", None) or Stream(self, torch.device("cuda", 0), "default of device 0")

    def set_stream(self, stream: Stream) -> None:
        self._threads.stream = stream

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        assert flags == 1
        self.log.append(f"register {num_bytes} on {self.stream.device} in {threading.current_thread().name}")
        if len(self.registered) == self.refused_at:
            return 2
        self.registered[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.log.append("unregister")
        del self.registered[address]
        return 0
