"""Agreement between ranks: bounded exchanges of values and errors through the job's key-value store.

Uses no process group of the job, so it works beside training traffic, from a background thread, and while another rank
hangs in a collective. Knows no files and no tensors.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch.distributed as dist
import xxhash
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.distributed_c10d import _get_default_store

from titan_ckpt.distributed.peer_groups import PeerGroups
from titan_ckpt.encoding.strict_json import Json
from titan_ckpt.errors import PeerError, listed

_Value = TypeVar("_Value")
_Facts = TypeVar("_Facts")
Store = Any
"""A torch.distributed Store; its stubs lack `clone`."""

FAILURES = (Exception, CheckpointException)
"""Exceptions of foreign code that a rank reports to the others: torch's own derives from BaseException."""

VALUE_BYTES = 1 << 20
"""No value in the job's store is larger: a TCPStore closes a connection that sends it more than 8 MiB at once."""
HAS_LEFT = "has left"
"""How the PeerError ends that names a rank which has left in order."""
_NUMBER_BYTES = 4
_LOOK_SECONDS = 0.5
"""A wait is counted in looks of this length, of which one at most passes while the process is stopped."""

_instances = itertools.count()
_bound = ContextVar("titan_ckpt bound", default=1800.0)


@contextlib.contextmanager
def bounded(timeout_seconds: float) -> Iterator[None]:
    """Set the timeout of Coordinators that code in this context makes for itself, such as a converter."""
    token = _bound.set(timeout_seconds)
    try:
        yield
    finally:
        _bound.reset(token)


class Coordinator:
    """This rank's line to all others. Collective: every rank makes the same calls, in the same order.

    One instance serves one thread at a time; `background()` returns one for a second thread.
    """

    def __init__(self, rank: int, world_size: int, store: Store | None, prefix: str, timeout_seconds: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timeout_seconds = timeout_seconds
        self._store = store
        self._prefix = prefix
        self._number = 0
        """The number of the exchange that this rank has begun last."""
        self._is_open = False
        """Whether an interrupt has left it in the middle, perhaps before this rank has posted."""
        self._clones = itertools.count()
        self._stale: list[str] = []
        self._silent: list[int] = []
        """Whom rank 0 waited for in vain in the last exchange of any line, except one that a leaving rank has ended."""
        self._over: PeerError | None = None
        """Why this line has ended: its store is lost, or a rank has left."""
        self._is_lost = False
        self._looks = 0
        """How often this rank has looked whether its conversation has ended."""
        self._lines = [self]
        """This line, and the lines made from it."""
        self.peers = PeerGroups(prefix)

    @staticmethod
    def current(timeout_seconds: float | None = None) -> Coordinator:
        """Build from the default process group, or for one rank without a group. Collective.

        `timeout_seconds`: by default the timeout of `bounded`, or half an hour.
        """
        timeout_seconds = _bound.get() if timeout_seconds is None else timeout_seconds
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return Coordinator(0, 1, None, "", timeout_seconds)
        # A clone has its own connection: a long wait must not block other users of the default store.
        default: Store = _get_default_store()
        return Coordinator(
            dist.get_rank(), dist.get_world_size(), default.clone(), f"titan_ckpt/{next(_instances)}", timeout_seconds
        )

    def background(self) -> Coordinator:
        """Return an independent line with its own connection, for use by one other thread. Collective."""
        store = None if self._store is None else self._store.clone()
        prefix = f"{self._prefix}/line-{next(self._clones)}"
        line = Coordinator(self.rank, self.world_size, store, prefix, self.timeout_seconds)
        line._silent = self._silent
        self._lines.append(line)
        return line

    def gloo_group(self, ranks: Sequence[int], name: str, most_seconds: float) -> Any:
        """Return a gloo group of these ranks, which is not registered with torch.distributed. All of them call it.

        `name`: one that no group had before. `most_seconds`: limit of the wait for the others, if it is less than half
        the timeout, so that the others still wait for this rank when it gives up.
        Raises: RuntimeError, also if gloo waits for longer, as it may for a rank that was killed meanwhile.
        """
        assert self._store is not None, "one rank alone is no group"
        seconds = min(most_seconds, self.timeout_seconds / 2)
        store = dist.PrefixStore(name, self._store.clone())

        def connect() -> Any:
            try:
                return dist.ProcessGroupGloo(store, ranks.index(self.rank), len(ranks), timedelta(seconds=seconds))
            except (AttributeError, dist.DistStoreError) as error:  # torch without gloo; a rank that does not come
                raise RuntimeError(str(error)) from error

        done, failed = self._aside(connect, name, 1.25 * seconds)
        if not done:
            raise failed[0] if failed else RuntimeError(f"gloo has not connected the ranks in {1.25 * seconds:g} s")
        return done[0]

    def close(self) -> None:
        """Leave this line and the lines made from it: a rank that waits for this one, now or later, raises at once.

        Its PeerError names the exception that is being handled here, if there is one. Rank 0 may serve the store, so it
        stays until all ranks have left but those that it waits for in vain, and at most 10 s. Collective at the end of
        a run; never raises.
        """
        self.peers.discard()
        if self._store is None or self._is_lost:
            return
        store, bound = self._store, min(10.0, self.timeout_seconds)
        error = sys.exception()
        cause = HAS_LEFT if error is None else f"{HAS_LEFT} because of {type(error).__name__}: {error}"
        verdict = _Verdict([(self.rank, cause)], [], is_last=True)
        silent = [*self._silent]
        left = [f"{self._prefix}/left/{rank}" for rank in range(self.world_size)]
        heard = [key for rank, key in enumerate(left) if rank not in silent]

        def leave() -> None:
            own = store.clone()  # an exchange that an interrupt has left in the middle may hold the other connection
            keys = [key for line in self._lines for key in line.leave(own, verdict)]
            own.set(left[self.rank], "")
            if self.rank == 0 and _arrive(own, heard, bound) and not silent:
                for key in keys + left:
                    own.delete_key(key)

        with contextlib.suppress(PeerError):
            self._run(leave, "close", bound)

    def leave(self, store: Store, verdict: _Verdict) -> list[str]:
        """Post the verdict of this line's next exchange, and of one that was left in the middle.

        Return the keys that nobody reads after all have left.
        """
        self._over = self._over or PeerError("this rank has left its Coordinator", [self.rank])
        keys = [*self._stale]
        for number in range(self._number + (not self._is_open), self._number + 2):
            exchange = self._exchange(store, number)
            exchange.end(verdict)
            keys += exchange.keys()
        return keys

    def together(self, tag: str, act: Callable[[], _Value]) -> _Value:
        """Call `act` on every rank, and return its value on this rank. Collective; fails on all ranks if one fails.

        An interrupt (KeyboardInterrupt, SystemExit) is an error too: the other ranks wait for an answer.
        Raises: as `gather`.
        """
        return self.exchange(tag, lambda: (act(), None))[0]

    def gather_results(self, tag: str, act: Callable[[], _Value]) -> list[_Value]:
        """Call `act` on every rank, and return the values of all ranks as JSON. Collective. Raises: as `gather`."""
        return self.exchange(tag, lambda: (None, act()))[1]

    def exchange(self, tag: str, act: Callable[[], tuple[_Value, _Facts]]) -> tuple[_Value, list[_Facts]]:
        """Call `act` on every rank, which returns a value and facts about it for the other ranks.

        Return this rank's value and the facts of all ranks as JSON. Collective. Raises: as `gather`.
        """
        value: Any = None
        facts: Any = None
        error: BaseException | None = None
        try:
            value, facts = act()
        except BaseException as caught:
            error = caught
        return value, cast("list[_Facts]", self.gather(tag, facts, error))

    def anywhere(self, tag: str, act: Callable[[], object]) -> bool:
        """Call `act` on every rank, and return whether its value is true on any. Collective. Raises: as `gather`."""
        return any(self.gather_results(tag, lambda: bool(act())))

    def on_rank_0(self, tag: str, act: Callable[[], _Value]) -> _Value:
        """Call `act` on rank 0, and return its value as JSON on every rank. Collective. Raises: as `gather`."""
        values: list[Any] = self.gather_results(tag, lambda: act() if self.rank == 0 else None)
        return cast(_Value, values[0])

    def gather_distinct(self, tag: str, act: Callable[[], Mapping[str, Any]]) -> dict[str, dict[tuple[int, ...], Any]]:
        """Call `act` on every rank for named JSON values; return by name each distinct value by the ranks that have it.

        1. Every rank posts a digest of each of its values. 2. Where the digests of a name differ, the lowest rank with
        each value posts it. So long lists that are mostly equal cost little. Lower ranks come first. A value that all
        its holders have in common is returned on these alone. Collective. Raises: as `gather`.
        """
        return self.exchange_distinct(tag, lambda: (None, act()))[1]

    def exchange_distinct(
        self, tag: str, act: Callable[[], tuple[_Value, Mapping[str, Any]]]
    ) -> tuple[_Value, dict[str, dict[tuple[int, ...], Any]]]:
        """Do as `gather_distinct` for an `act` that also returns a value, which is returned on this rank alone."""

        def digests() -> tuple[tuple[_Value, Mapping[str, Any]], dict[str, str]]:
            value, own = act()
            if self.world_size == 1:
                return (value, own), dict.fromkeys(own, "")
            of_each = {name: xxhash.xxh3_128_hexdigest(json.dumps(each).encode()) for name, each in own.items()}
            return (value, own), of_each

        (value, own), of_ranks = self.exchange(f"{tag}/digests", digests)
        holders: dict[str, dict[str, list[int]]] = {}
        for rank, of_rank in enumerate(of_ranks):
            for name, digest in of_rank.items():
                holders.setdefault(name, {}).setdefault(digest, []).append(rank)
        differing = {name for name, by_digest in holders.items() if len(by_digest) > 1}
        posted: list[dict[str, Any]] = []
        if differing:
            speaks = {name for name in differing if any(ranks[0] == self.rank for ranks in holders[name].values())}
            posted = cast("list[dict[str, Any]]", self.gather(tag, {name: own[name] for name in speaks}))
        distinct = {
            name: {
                tuple(ranks): posted[ranks[0]][name] if name in differing else own[name] for ranks in by_digest.values()
            }
            for name, by_digest in holders.items()
            if name in differing or name in own
        }
        return value, distinct

    def barrier(self, tag: str, error: BaseException | None = None, timeout_seconds: float | None = None) -> None:
        """Wait until every rank has called. Raises: as `gather`."""
        self.gather(tag, None, error, timeout_seconds)

    def broadcast(self, tag: str, value: Json) -> Json:
        """Return rank 0's value on every rank; the others' is ignored. Also a barrier. Raises: as `gather`."""
        return self.gather(tag, value if self.rank == 0 else None)[0]

    def gather(
        self, tag: str, value: Json, error: BaseException | None = None, timeout_seconds: float | None = None
    ) -> list[Json]:
        """Return every rank's value on every rank, or fail on all of them.

        1. Every rank posts its value, or its error. 2. Rank 0 collects them and posts one verdict. 3. All read it.
        Raises: `error` itself on the rank that passed one; PeerError on the others, naming each rank that failed and
        why, and each that did not post within `timeout_seconds`. After a rank has left, every exchange raises at once.
        """
        if self._store is None:
            if error is not None:
                raise error
            return [json.loads(json.dumps(value))]
        if self._over is not None:
            raise error or self._over
        bound = self.timeout_seconds if timeout_seconds is None else timeout_seconds
        post: dict[str, Json] = {"tag": tag, "value": value}
        if error is not None:
            post = {"tag": tag, "error": f"{type(error).__name__}: {error}"}
        self._is_open = True
        self._number += 1
        exchange = self._exchange(self._store, self._number)
        try:
            verdict = self._run(lambda: exchange.run(post, bound, self._stale), tag, bound)
        except PeerError:
            if error is None:
                raise
            raise error from None
        if not verdict.is_last:
            self._silent[:] = exchange.silent
        self._is_open = verdict.is_in_vain
        if not verdict.failures:
            return verdict.values
        by_cause: dict[str, list[int]] = {}
        for rank, cause in verdict.failures:
            by_cause.setdefault(cause, []).append(rank)
        lines = "".join(f"\n  {_ranks_text(ranks)} {cause}" for cause, ranks in by_cause.items())
        failed = [rank for rank, _ in verdict.failures]
        fault = PeerError(f"{tag}: stopped on all ranks because{lines}", failed)
        if verdict.is_last:
            self._over = fault
        raise error or fault

    def _exchange(self, store: Store, number: int) -> _Exchange:
        prefix = f"{self._prefix}/{number}"
        return _Exchange(store, prefix, self.rank, self.world_size, lambda: self._looks * _LOOK_SECONDS)

    def first_post(self, key: str, text: str | None) -> str | None:
        """Post a text under a key unless a rank has posted one, and return the posted text or None. Not collective.

        Raises: dist.DistError if the store is gone.
        """
        if self._store is None:
            return text
        key = f"{self._prefix}/{key}"
        if text is not None:
            posted: bytes = self._store.compare_set(key, "", text)
            return posted.decode()
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _run(self, conversation: Callable[[], _Value], tag: str, bound: float) -> _Value:
        """Run the exchange. Raises: PeerError if the store is lost or does not answer; what the exchange raises."""
        done, failed = self._aside(conversation, tag, bound + 4 * _grace(bound))
        if done:
            return done[0]
        error = failed[0] if failed else None
        if error is None:
            fault = (
                f"the store of the process group has not answered for {bound:g} s. It is served by rank 0 or its "
                "launcher, which hangs or cannot be reached"
            )
        elif isinstance(error, dist.DistError):
            fault = f"lost the store of the process group, which rank 0 or its launcher serves: {error}"
        else:
            raise error
        self._is_lost = True
        self._over = PeerError(f"{tag}: {fault}", [0])
        raise self._over from error

    def _aside(self, act: Callable[[], _Value], tag: str, seconds: float) -> tuple[list[_Value], list[BaseException]]:
        """Call `act` in a thread of its own, because some calls have no timeout if another host stops.

        Return its value, or its error, each in a list; nothing if it has not ended in time. If no thread can be
        started, as while Python 3.12 and later wait for a save at exit, it is called in this thread.
        """
        done: list[_Value] = []
        failed: list[BaseException] = []

        def target() -> None:
            try:
                done.append(act())
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=target, name=f"titan_ckpt exchange {tag}", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            target()
        else:
            last = self._looks + seconds / _LOOK_SECONDS
            while thread.is_alive() and self._looks < last:
                thread.join(_LOOK_SECONDS)
                self._looks += 1
        return done, failed


@dataclass(frozen=True, slots=True)
class _Verdict:
    """The answer to all ranks: each failed rank with its cause, or every rank's value."""

    failures: list[tuple[int, str]]
    values: list[Json]
    is_last: bool = False
    """A rank has left, so the line has ended."""
    is_in_vain: bool = False
    """A rank has given up waiting, and those that it waited for may not have read this yet."""

    def fields(self) -> Json:
        """Return what is posted."""
        return cast(Json, [self.failures, self.values, self.is_last, self.is_in_vain])


class _Exchange:
    """One gather: its keys in the store and both sides of the conversation.

    The first verdict counts. Rank 0 posts it, or a rank that has waited in vain, or one that leaves and takes no part;
    that rank then also fills the posts that rank 0 waits for, with nothing.
    """

    def __init__(self, store: Store, prefix: str, rank: int, world_size: int, clock: Callable[[], float]) -> None:
        """`clock` returns seconds, and stands still while this process does."""
        self._store = store
        self._clock = clock
        self._rank = rank
        self._posts = [f"{prefix}/{peer}" for peer in range(world_size)]
        self._verdict = f"{prefix}/verdict"
        self._parts: list[str] = []
        """Keys of values that are cut, as far as this rank knows them."""
        self.silent: list[int] = []
        """The ranks that rank 0 has waited for in vain."""

    def run(self, post: Json, bound: float, stale: list[str]) -> _Verdict:
        self._store.set(self._posts[self._rank], self._head_of(post, self._posts[self._rank]))
        if self._rank != 0:
            return self._await_verdict(bound)
        verdict, complete = self._collect(bound)
        self._forget(complete, stale)
        return verdict

    def end(self, verdict: _Verdict) -> None:
        """Post the verdict in place of rank 0, unless there is one; one of ranks that waited in vain gets the cause."""
        posted = self._post_verdict(verdict)
        if posted.is_in_vain and not posted.is_last:
            both = _Verdict([*posted.failures, *verdict.failures], [], is_last=True, is_in_vain=True)
            self._store.set(self._verdict, self._head_of(both.fields(), self._verdict))
        if posted is verdict:
            nothing = [""] * len(self._posts)
            if self._store.has_extended_api():
                self._store.multi_set(self._posts, nothing)
            else:
                for key in self._posts:
                    self._store.set(key, "")

    def keys(self) -> list[str]:
        return [*self._posts, self._verdict, *self._parts]

    def _collect(self, bound: float) -> tuple[_Verdict, bool]:
        """On rank 0, wait for every post, and post the verdict; return it and whether all ranks have posted."""
        complete = self._arrive(self._posts, bound)
        present = [complete or self._store.check([key]) for key in self._posts]
        self.silent = [rank for rank, posted in enumerate(present) if not posted]
        keys = list(itertools.compress(self._posts, present))
        heads = iter(self._store.multi_get(keys) if self._store.has_extended_api() else map(self._store.get, keys))
        posts: list[Any] = []
        for key, posted in zip(self._posts, present, strict=True):
            head = next(heads) if posted else None
            if head == b"":  # a rank has left
                return self._read_verdict(), False
            posts.append(None if head is None else self._value_at(key, head))
        tag = posts[0]["tag"]
        failures: list[tuple[int, str]] = []
        for rank, post in enumerate(posts):
            if post is None:
                failures.append((rank, f"did not arrive within {bound:g} s"))
            elif "error" in post:
                failures.append((rank, f"failed: {post['error']}"))
            elif post["tag"] != tag:
                failures.append((rank, f"is at {post['tag']!r} while rank 0 is at {tag!r}"))
        values = [] if failures else [post["value"] for post in posts]
        return self._post_verdict(_Verdict(failures, values)), complete

    def _post_verdict(self, verdict: _Verdict) -> _Verdict:
        """Post a verdict unless there is one; return the one that is there."""
        head = self._head_of(verdict.fields(), self._verdict)
        return verdict if self._store.compare_set(self._verdict, "", head) == head else self._read_verdict()

    def _read_verdict(self) -> _Verdict:
        value: Any = self._value_at(self._verdict, self._store.get(self._verdict))
        return _Verdict(*value)

    def _await_verdict(self, bound: float) -> _Verdict:
        """On other ranks, wait a little longer than rank 0, whose verdict names the silent ranks for all."""
        if not self._arrive([self._verdict], bound + _grace(bound)):
            silent = [rank for rank, key in enumerate(self._posts) if not self._store.check([key])]
            if not silent and not self._arrive([self._verdict], _grace(bound)):
                silent = [0]
            if silent:  # rank 0 must not go on when it wakes up, because this rank has given up
                return self._post_verdict(
                    _Verdict([(r, f"did not answer within {bound:g} s") for r in silent], [], is_in_vain=True)
                )
        return self._read_verdict()

    def _arrive(self, keys: Sequence[str], seconds: float) -> bool:
        """Wait for keys; return whether they are there.

        The time in which this process was stopped does not count, because a job that is suspended stops on all ranks.
        """
        began = self._clock()
        if _arrive(self._store, keys, seconds):
            return True
        left = seconds - (self._clock() - began)
        return left > 2 * _LOOK_SECONDS and self._arrive(keys, left)

    def _head_of(self, value: Json, key: str) -> bytes:
        """Compress a value and return what to post under its key, with the number of parts that were posted before."""
        data = zlib.compress(json.dumps(value, separators=(",", ":")).encode(), 1)
        first = VALUE_BYTES - _NUMBER_BYTES
        parts = [data[start : start + VALUE_BYTES] for start in range(first, len(data), VALUE_BYTES)]
        for part, part_key in zip(parts, self._keys_of_parts(key, len(parts)), strict=True):
            self._store.set(part_key, part)
        return len(parts).to_bytes(_NUMBER_BYTES, "big") + data[:first]

    def _value_at(self, key: str, head: bytes) -> Json:
        """Return a value whose head was read."""
        keys = self._keys_of_parts(key, int.from_bytes(head[:_NUMBER_BYTES], "big"))
        data = b"".join([head[_NUMBER_BYTES:], *map(self._store.get, keys)])
        return cast(Json, json.loads(zlib.decompress(data)))

    def _keys_of_parts(self, key: str, count: int) -> list[str]:
        keys = [f"{key}.{number}" for number in range(count)]
        self._parts += keys
        return keys

    def _forget(self, complete: bool, stale: list[str]) -> None:
        """On rank 0, delete keys that nobody will read again, so that the store does not grow.

        A rank that has posted has read every earlier verdict; after an incomplete exchange a late rank may still read.
        """
        of_verdict = [key for key in self.keys() if key.startswith(self._verdict)]
        if complete:
            for key in {*stale, *self.keys()}.difference(of_verdict):
                self._store.delete_key(key)
            stale[:] = of_verdict
        else:
            stale += self.keys()


def _arrive(store: Store, keys: Sequence[str], seconds: float) -> bool:
    """Wait for keys; return whether they are there."""
    try:
        store.wait(list(keys), timedelta(seconds=seconds))
    except RuntimeError as error:  # a DistStoreError of a TCPStore
        if isinstance(error, dist.DistStoreError) or str(error).startswith("Wait timeout"):
            return False
        raise
    return True


def _ranks_text(ranks: Sequence[int]) -> str:
    numbers = listed([str(rank) for rank in ranks], ", ", " ")
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"


def _grace(bound: float) -> float:
    return 1.0 + 0.05 * bound
