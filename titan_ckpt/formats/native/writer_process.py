"""A separate process that writes staged files, so that training has the interpreter to itself meanwhile.

Owns both ends of the pipes to the process. The arena is shared memory, so no tensor is sent: a request names a file and
the layout of its bytes, the answer is the file's digest or the error. The process commits nothing, the trainer does: if
the process is killed or outlives its trainer, it leaves an attempt that nobody commits. So the trainer kills it when it
is not needed, also one that is stopped. It ends itself when its trainer has ended: a process that the trainer forked
may live on and hold the pipe open.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from titan_ckpt.disk.kernel import Buffer, SharedBuffer, map_memory, round_up
from titan_ckpt.encoding.named import import_named
from titan_ckpt.errors import SaveError
from titan_ckpt.formats.native.sealed_file import Headed, write_rank_file
from titan_ckpt.stores.store import OTHERS, Place, StoreConfig, open_location, store_of

_OF_THE_TRAINER = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
"""Signals that the writer blocks: the trainer answers them, and may need the writer to finish the save in flight."""

_MAIN = f"from {__name__} import main; main()"
"""Not `-m`, which would warn that the package has imported the module before. With `-P`, or the working folder would
come first, which is on the trainer's path only where that says so."""

_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": ""}
"""The process sees no device, so that nothing it imports can take memory of one."""

_LOOK_SECONDS = 1.0
"""Longest time that a writer outlives its trainer if its input stays open."""


class WriterProcess:
    """The trainer's end. Creating it starts the process, which imports no torch; only a write waits for it."""

    def __init__(self, shared: SharedBuffer, timeout_seconds: float = 1800.0) -> None:
        """Start a process that maps `shared`. `timeout_seconds`: how long it may do nothing during a write."""
        self._timeout_seconds = timeout_seconds
        self._is_answering = False
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        try:  # the call that blocks them may raise: it lets a signal that came before it be handled
            signal.pthread_sigmask(signal.SIG_BLOCK, _OF_THE_TRAINER)  # inherited, so blocked from the start
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _MAIN, str(shared.fd), str(len(shared.buffer.view)), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,  # without a lock, which a forked process would inherit locked
                pass_fds=[shared.fd],
                env=os.environ
                | _ENVIRONMENT
                | {"PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)},  # where it found us
                start_new_session=True,  # a Ctrl-C reaches the trainer alone, which may finish the save in flight
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._pipes = (self._process.stdin, self._process.stdout)
        _running.add(self)

    @property
    def is_idle(self) -> bool:
        """Return whether it can take a request: it lives, and an interrupt has left no answer in the pipe."""
        return self._process.poll() is None and not self._is_answering

    def write(self, path: Place, layout: Headed, header_at: int) -> str:
        """Let the process write a file and return its digest. The file is durable then.

        The shared memory holds the data at its start and the unsealed header at `header_at`.
        Raises: OSError as the process met it; SaveError if the process died or does not answer in time.
        """
        requests, answers = self._pipes
        kind: Any = OTHERS.get(str(path).partition(":")[0])
        request = {
            "path": str(path),
            "store": asdict(store_of(path).settings),
            "kind": f"{kind.__module__}:{kind.__qualname__}" if kind else "",
            "header_bytes": len(layout.header),
            "num_bytes": layout.num_bytes,
            "header_at": header_at,
        }
        self._is_answering = True
        try:
            requests.write(json.dumps(request).encode() + b"\n")
            self._await_answer(path)
            answer = answers.readline()
        except BrokenPipeError:
            answer = b""
        if not answer:
            code = self._process.wait()
            cause = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
            raise SaveError(f"{path}: the writer process ended with {cause}; the next save starts another")
        self._is_answering = False
        result = json.loads(answer)
        if "errno" in result:
            raise OSError(result["errno"], result["message"], str(path))
        if "message" in result:
            raise SaveError(f"{path}: the writer process failed: {result['message']}")
        return str(result["digest"])

    def _await_answer(self, path: Place) -> None:
        """Wait for the begin of an answer. The time in which this process itself was stopped does not count."""
        answers = select.poll()
        answers.register(self._pipes[1], select.POLLIN)
        idle, before = 0.0, ""
        while not answers.poll(1000 * _LOOK_SECONDS):
            now = _processor_time(self._process.pid)
            idle, before = (idle + _LOOK_SECONDS if now == before else 0.0), now
            if idle >= self._timeout_seconds:
                self._process.kill()
                raise SaveError(
                    f"{path}: the writer process {self._process.pid} has done nothing for {idle:g} s and was killed: "
                    "was it stopped, or does its disk hang? The next save starts another"
                )

    def close(self) -> None:
        """End the process. An interrupt may leave it, and it is called again then."""
        self._process.kill()
        self._process.wait()
        for pipe in self._pipes:
            pipe.close()


_running: weakref.WeakSet[WriterProcess] = weakref.WeakSet()


def _disown_in_child() -> None:
    """Let copies of writers in a forked process, whose child no writer process is, have nothing to do."""
    for writer in tuple(_running):
        writer._process.returncode = 0  # noqa: SLF001 - of this module
        for pipe in writer._pipes:  # noqa: SLF001 - as above
            pipe.close()


os.register_at_fork(after_in_child=_disown_in_child)


def _processor_time(pid: int) -> str:
    """Return fields 14 and 15 of /proc/<pid>/stat, by which a process that does anything is known."""
    with suppress(OSError):
        return " ".join(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[11:13])
    return ""


class _Head(NamedTuple):
    """A file as a request describes it."""

    header: bytes
    num_bytes: int


def serve(shared: Buffer, trainer: int) -> None:
    """Answer requests from standard input until it ends or the process `trainer` has ended."""
    for line in _requests(trainer):
        request = json.loads(line)
        header_at = request["header_at"]
        header = bytes(shared.view[header_at : header_at + request["header_bytes"]])
        layout = _Head(header, request["num_bytes"])
        answer: dict[str, object]
        try:
            if kind := request["kind"]:  # the trainer has named it in OTHERS
                OTHERS[request["path"].partition(":")[0]] = import_named(kind, "store")
            digest = write_rank_file(
                open_location(request["path"], settings=StoreConfig(**request["store"])),
                layout,
                lambda a, b: nullcontext(shared.view[a : round_up(b)]),
                views=lambda a, b: [shared.view[a:b]],
            )
            answer = {"digest": digest}
        except OSError as error:
            answer = {"errno": error.errno, "message": error.strerror or str(error)}
        except Exception as error:
            answer = {"message": f"{type(error).__name__}: {error}"}
        try:
            os.write(1, json.dumps(answer).encode() + b"\n")  # not by sys.stdout, which would try again at the exit
        except BrokenPipeError:  # the trainer has ended
            return


def _requests(trainer: int) -> Iterator[str]:
    """Yield lines of standard input. They come one at a time: the next one is sent after the answer."""
    while os.getppid() == trainer:
        if select.select([sys.stdin], [], [], _LOOK_SECONDS)[0]:
            if not (line := sys.stdin.readline()):
                return
            yield line


def main() -> None:
    """Map the trainer's arena and serve. The trainer's signals were blocked before this process started."""
    fd, size, trainer = map(int, sys.argv[1:4])
    serve(Buffer.of(map_memory(size, fd, shared=True), size), trainer)
