"""Let the ranks that save or load together agree, and notice that they lost each other."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch.distributed as dist

from ckpt.consistency import environment
from ckpt.errors import CheckpointError, ConfigurationError
from ckpt.ranks.collective_errors import end_waits, is_connection_error, let_go
from ckpt.ranks.heartbeat import Limits, Watch
from ckpt.ranks.many_failures import Outcome
from ckpt.ranks.point_to_point import LONGEST_WAIT
from ckpt.ranks.progress import Progress
from ckpt.ranks.roll_call import Answer, Cause, RollCall
from ckpt.ranks.tree import Tree
from ckpt.ranks.waits import waiting_for
from ckpt.torch_private import default_store, group_names, set_group_timeout

DEFAULT_TIMEOUT_S = 600.0

_MIN_TIMEOUT_S, _MAX_TIMEOUT_S = 1.0, 7 * 86400.0

_MANAGER_WAIT = timedelta(hours=1)
"""Without a watch: between two calls of a manager the ranks train, and that is not for it to judge."""

_LATER_TAG = 1

T = TypeVar("T")
Purpose = Literal["foreground", "background", "conversion", "manager"]
_Name = tuple[Purpose, tuple[int, ...]]

_own_groups: dict[_Name, tuple[weakref.ref[Any], weakref.ref[Any]]] = {}
"""The default group and ours. torch keeps them: `destroy_process_group` has to end the threads of both, as one
that still lets go of a tensor when Python ends aborts the program."""
_calls: Counter[_Name] = Counter()
_broken: set[_Name] = set()


class RanksFailed(Exception):
    """Some ranks failed where all had to succeed.

    Attributes:
        failures: by rank, the same on every rank; of thousands some.
        count: how many ranks failed.
        own: that of this rank, if it failed.
        is_refusal: all ranks failed, by arguments that are wrong.
    """

    def __init__(
        self,
        failures: Mapping[int, CheckpointError],
        *,
        count: int,
        own: CheckpointError | None = None,
        is_refusal: bool = False,
    ) -> None:
        super().__init__(failures)
        self.failures, self.count, self.own, self.is_refusal = dict(failures), count, own, is_refusal


class Ranks:
    """The process group of one save, load or conversion; all ranks make theirs at the same point.

    It is a gloo group of this library's own, over all ranks or those of the caller's group: object
    collectives over NCCL would take GPU memory, those of a background save must not mix with the
    trainer's, and it can be given up when a rank dies or stops, which frees the others.

    Args:
        timeout_s: every rank has failed when one has made no progress for so long.

    Attributes:
        progress: what this rank is doing now.
        is_own_group: the group is gloo's, and of this library's own.
        tree: of the ranks; None over the caller's group.
        is_meant_alone: the caller asked for `no_dist`.
        members: the ranks of the default group that these are, in order.
        call: number of this call among those of its purpose and ranks, the same on all ranks.
    """

    def __init__(
        self,
        process_group: Any,
        *,
        no_dist: bool,
        purpose: Purpose = "foreground",
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self.no_dist = no_dist or not (dist.is_available() and dist.is_initialized())
        self.is_meant_alone = no_dist
        self.group: Any = process_group
        self.progress = Progress()
        self._timeout_s = timeout_s
        self.members = [0] if self.no_dist else dist.get_process_group_ranks(process_group)
        self._limits = Limits(timeout_s if _is_timeout(timeout_s) else DEFAULT_TIMEOUT_S, len(self.members))
        self._name: _Name = (purpose, tuple(self.members))
        self._longest_wait = _MANAGER_WAIT if purpose == "manager" else LONGEST_WAIT
        self.is_own_group = False
        self.tree: Tree | None = None
        # Asked now: a program may end its process group while a save still runs.
        self.rank = 0 if self.no_dist else dist.get_rank(process_group)
        self._global_rank = 0 if self.no_dist else dist.get_rank()
        self._connected = self.size == 1
        self._watch: Watch | None = None
        self.purpose, self.call = purpose, 0
        if self.size > 1 and purpose != "manager":
            _calls[self._name] += 1
            self.call = _calls[self._name]
            self._watch = Watch(
                default_store(),
                f"{purpose}/{zlib.crc32(repr(self.members).encode())}",
                rank=self.rank,
                size=self.size,
                call=self.call,
                limits=self._limits,
                progress=self.progress,
                break_off=_weakly(self._break_off),
            )

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def stall_s(self) -> float:
        """How long a rank may work without progress, such that it can still tell the others."""
        return self._limits.stall_s

    def broadcast(self, value: Any) -> Any:
        """Return the first rank's `value` on all ranks."""
        if self.size == 1:
            return value
        if self.tree is not None:
            return self.tree.broadcast(value)
        box = [value]
        dist.broadcast_object_list(box, group=self.group, group_src=0)
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Return every rank's `value`, in order, on all ranks."""
        if self.tree is not None:
            return self.tree.gather(value)
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def most(self, values: Sequence[int]) -> list[int]:
        """Return the largest of all ranks' `values`, place by place."""
        with waiting_for(self, "the other ranks to make the same call"):
            return self.join([*map(int, values)], _most)

    def most_later(self, values: Sequence[int]) -> Future[list[int]]:
        """Begin what `most` does, and return at once; wait for the answer before the next such call.

        A rank that is late holds up who waits for the answer; one that is gone is an error of torch.
        """
        answer: Future[list[int]] = Future()
        if self.size > 1:
            self.connect()
        tree = self.tree
        if tree is None:  # over the caller's group, collectives must have one order
            answer.set_result(self.most(values))
            return answer

        def find() -> None:
            try:
                answer.set_result(tree.join([*map(int, values)], _most, tag=_LATER_TAG))
            except BaseException as error:
                answer.set_exception(error)

        environment.start_thread(find, "ckpt-step")
        return answer

    def from_first(self, work: Callable[[], T]) -> T:
        """Run `work` on the first rank; return its result or raise its error, as one of ours, on all."""
        self.connect()
        answer: tuple[bool, Any] | None = None
        interrupt: BaseException | None = None
        if self.rank == 0:
            try:
                answer = True, work()
            except Exception as error:
                answer = False, portable(error, None if self.size == 1 else 0)
            except BaseException as error:
                interrupt, answer = error, (False, _interrupted(error, 0))
        with waiting_for(self, "rank 0, which works for all"):
            worked, value = self.broadcast(answer)
        if interrupt is not None:
            raise interrupt
        if not worked:
            raise value
        return value  # type: ignore[no-any-return]

    def together(self, call: str, work: Callable[[], T]) -> T:
        """Run `work` on every rank; return this rank's result if all succeeded.

        Raises:
            RanksFailed: on every rank, if it failed on one or the ranks are not in the same `call`.
        """
        self.progress.wait_for("all ranks to connect")
        self.connect()
        self.progress.begin(f"preparing the {call}")
        value: Any = None
        failure: CheckpointError | None = None
        interrupt: BaseException | None = None
        try:
            check_timeout(self._timeout_s)
            value = work()
        except Exception as error:
            failure = portable(error, None if self.size == 1 else self.rank)
        except BaseException as error:  # an interrupt of this rank alone, for which the others must not wait
            interrupt = error
            failure = _interrupted(error, self.rank)
        self.progress.wait_for(f"the other ranks to enter the {call}")
        with waiting_for(self, f"the other ranks to enter the {call}: every rank has to make this call"):
            outcome = self.join(Outcome.of(self.rank, call, failure), Outcome.join)
        if interrupt is not None:
            raise interrupt
        if outcome.failed:
            is_refusal = outcome.refused == self.size
            raise RanksFailed(outcome.failures, count=outcome.failed, own=failure, is_refusal=is_refusal)
        if len(outcome.calls) > 1:
            raise RanksFailed({0: _different_calls(outcome.calls)}, count=self.size)
        return value  # type: ignore[no-any-return]

    def join(self, value: T, join: Callable[[T, T], T]) -> T:
        """Return what all ranks' values join to, on all ranks: in few steps, at any number of ranks."""
        if self.size == 1:
            return value
        self.connect()
        return (
            functools.reduce(join, self.gather(value)) if self.tree is None else self.tree.join(value, join)
        )

    def roll_call(self, error: BaseException) -> RollCall | None:
        """End the broken group, so that ranks that wait in it wake up, and ask each what failed; None: the store is gone."""
        cause: Cause = "connection" if is_connection_error(error) else "own"
        if self.size == 1:
            return RollCall({0: Answer(True, failure=_text(error), cause=cause)}, is_complete=True)
        self._give_up(error)
        return None if self._watch is None else self._watch.roll_call(_text(error), cause)

    def close(self) -> None:
        """End the heartbeats of this rank with the save or load."""
        if self._watch is not None:
            self._watch.close()

    def _break_off(self) -> None:
        """End the collective that this rank waits in, from another thread."""
        group, tree = self.group, self.tree
        if group is not None and tree is not None:
            # First those with whom it is connected: to others a connection would have to be made.
            ranks = dict.fromkeys([*tree.neighbours, *range(self.size)])
            end_waits(group, [other for other in ranks if other != self.rank])

    def connect(self) -> None:
        """Make the connections and begin the heartbeats; the first time all ranks wait for each other here."""
        if not self._connected:
            with waiting_for(self, f"all {self.size} ranks to make the same call"):
                own = self._own_group()
            if own is not None:
                self.group, self.is_own_group = own, True
                self.tree = Tree(own, self.rank, self.size, self._longest_wait, self.progress)
            self._connected = True
            if self._watch is not None:
                self._watch.start()

    def _own_group(self) -> Any:
        """Return our gloo group, made once for each default group; None to use the caller's."""
        world = dist.group.WORLD
        known = _own_groups.get(self._name)
        if known is not None and known[0]() is world and (group := known[1]()) is not None:
            return group
        # A rank that died before its first save or load must not be waited for as long as a slow one.
        timeout = timedelta(seconds=self._limits.stall_s)
        if self.size == dist.get_world_size():
            with _lazy_connections():
                group = dist.new_group(backend="gloo", timeout=timeout)
        elif self._name in _broken or len(set(self.gather(len(group_names())))) > 1:
            # torch names a group of some ranks after them and the number of groups that each knows. If
            # the numbers differ, the ranks would wait for each other under different names.
            return None
        else:
            with _lazy_connections():
                group = dist.new_group(self.members, timeout, backend="gloo", use_local_synchronization=True)
        set_group_timeout(self._longest_wait, group)
        _own_groups[self._name] = (weakref.ref(world), weakref.ref(group))
        return group

    def _give_up(self, error: BaseException) -> None:
        """Let go of our group: its connections close when nothing, no traceback either, refers to it."""
        if not self.is_own_group:
            return
        _own_groups.pop(self._name, None)
        _broken.add(self._name)
        groups = [self.group]
        self.group, self.is_own_group, self.tree = None, False, None
        let_go(groups, error, max(1.0, self._limits.period_s))


def check_group(no_dist: bool) -> None:
    """Raise ConfigurationError if a launcher made several processes, and none knows of the others.

    `no_dist`: the caller wants this process to save alone.
    """
    if not no_dist and (text := lacks_group()):
        raise ConfigurationError(text)


def lacks_group() -> str:
    """Say what is wrong if a launcher made several processes, and none knows of the others; empty if all is right."""
    world = os.environ.get("WORLD_SIZE", "")
    if not world.isdecimal() or int(world) <= 1 or (dist.is_available() and dist.is_initialized()):
        return ""
    return (
        f"WORLD_SIZE is {world}, but this process has no process group, so each of these processes would save alone to "
        "the same place: call torch.distributed.init_process_group first, or pass no_dist=True to save alone"
    )


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    """Call a method while its object lives: a group is not kept by the watch over it."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        if (method := reference()) is not None:
            method()

    return call


@contextlib.contextmanager
def _lazy_connections() -> Iterator[None]:
    """Let gloo connect two ranks when they first talk.

    Otherwise all connect to all when the group is made, which takes hours at 16,384 ranks. A program
    that has set the variable has chosen.
    """
    name = "TORCH_GLOO_LAZY_INIT"
    if name in os.environ:
        yield
        return
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name, None)


def _most(some: list[int], others: list[int]) -> list[int]:
    return [max(pair) for pair in zip(some, others, strict=True)]


def _different_calls(calls: Mapping[str, int]) -> CheckpointError:
    text = ", ".join(f"rank {other} in a {call}" for call, other in calls.items())
    return CheckpointError(
        f"the ranks are in different calls: {text}; all ranks have to make the same call, with the same options"
    )


def _interrupted(interrupt: BaseException, rank: int) -> CheckpointError:
    return CheckpointError(f"interrupted: {type(interrupt).__name__}", rank=rank)


def portable(error: Exception, rank: int | None) -> CheckpointError:
    """Return `error` as one of ours that names its rank, if there are several, and can travel to another process."""
    if isinstance(error, CheckpointError):
        error.rank = rank if error.rank is None else error.rank
        with contextlib.suppress(Exception):
            pickle.loads(pickle.dumps(error))
            return error
    return CheckpointError(_text(error), rank=rank)


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def check_timeout(timeout_s: float) -> float:
    """Return `timeout_s`, or raise ConfigurationError if it makes no sense."""
    if not _is_timeout(timeout_s):
        raise ConfigurationError(f"timeout_s must be {_MIN_TIMEOUT_S:g} s to 7 days, not {timeout_s!r}")
    return float(timeout_s)


def _is_timeout(timeout_s: object) -> bool:
    is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    return is_number and _MIN_TIMEOUT_S <= timeout_s <= _MAX_TIMEOUT_S  # type: ignore[operator]
