"""The processes of a group: an error on each of them, and no hang.

A chain with collectives runs on every process of a group. Where one runs something else, or fails,
the others would wait for it. So the processes compare what they run, through the store of
``torch.distributed`` whenever it is new to one of them: a collective would wait for the very
process that is missing. One that fails says so in the store, and those that wait look there.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_dynamo_compiling

# torch 2.13 renamed them, and warns of the old names
gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""``torch.distributed``'s all-gather of equal parts; takes the whole, and the part."""
_scatter_into: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_LOOK = 0.05  # seconds between two looks into the store
_ANSWER = 5.0  # seconds in which the others say that they failed too
_BEHIND = 10.0  # seconds by which a process may be slower than the others
_talks: WeakKeyDictionary[Any, Talk] = WeakKeyDictionary()  # by group


class RankError(RuntimeError):
    """The processes of a group run different things, or one is missing; the others know it.

    Attributes:
        located: Whether its text names the chain and the op.
    """

    located = False


class Group:
    """A process group as an op holds it: copies of the op share it, and it is not saved.

    Attributes:
        given: The group; None: all processes.
        size: Its number of processes.

    Raises:
        TypeError: It is not a process group.
        ValueError: This process is not in it.
    """

    def __init__(self, given: Any) -> None:
        wanted = "expected a process group that has this process, got"
        if given is not None and given == dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(f"{wanted} one without it")
        if given is not None and not isinstance(given, dist.ProcessGroup):
            raise TypeError(f"{wanted} {given!r}")
        self.given, self.size = given, dist.get_world_size(given)
        if self.size < 1:
            raise ValueError(f"{wanted} one without it")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Group) and other.given is self.given

    def __hash__(self) -> int:
        return hash(self.given)

    def __deepcopy__(self, memo: Any) -> Group:
        return self

    def __reduce__(self) -> tuple[type[Group], tuple[None]]:
        if self.given is not None:
            how = "save its state_dict, and make it again where that is loaded"
            raise TypeError(f"an op that holds a process group cannot be pickled: {how}")
        return Group, (None,)

    @property
    def talk(self) -> Talk | None:
        """What its processes say to each other; None: they are simulated, or only one."""
        group: Any = self.given or dist.group.WORLD
        if self.size == 1 or "fake" in dist.get_backend(group):
            return None
        known = _talks.get(group)
        if known is None:
            known = _talks[group] = Talk(group)
        return known


class Talk:
    """What the processes of one group say to each other.

    Attributes:
        looks: Whether a process that waits for a collective can look into the store meanwhile.
        started: How many collectives this process started, that the host waits for.
        failures: How many there were, of this process or of another one. What is compared before
            one is not read after it.

    Args:
        group: The group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._rank, self._seconds = dist.get_rank(group), _seconds(group)
        self._ranks = dist.get_process_group_ranks(group)
        self._others = [rank for rank in range(len(self._ranks)) if rank != self._rank]
        default, name = dist.distributed_c10d._get_default_store(), f"opfuse/{group.group_name}"
        # a store may outlive a group, and the next one has its name
        number = default.add(f"{name}/groups/{self._rank}", 1)
        self._store = dist.distributed_c10d.PrefixStore(f"{name}/{number}", default)
        # its waits may end before the collective
        self.looks = "gloo" in str(dist.get_backend_config(group))
        self.started = self.failures = self._compared = 0
        self._broken = ""

    @property
    def me(self) -> str:
        """This process, for messages."""
        return f"rank {self._ranks[self._rank]}"

    def compare(self, facts: Mapping[str, Any]) -> None:
        """Compare facts with the other processes, all of which must come here.

        Args:
            facts: What must be the same, as JSON-able data; causes come before effects.

        Raises:
            RankError: They differ, on every process alike; or another one failed or did not come.
        """
        first, *others = self.exchange(facts)
        for rank, of_rank in zip(self._ranks[1:], others, strict=True):
            if difference := first_difference(first, of_rank):
                raise RankError(f"rank {self._ranks[0]} and rank {rank} differ in {difference}")

    def exchange(self, facts: Mapping[str, Any]) -> list[Any]:
        """Give facts to the other processes, all of which must come here.

        Args:
            facts: JSON-able data, among it ``"the chain"`` and ``"what it is called with"``.

        Returns:
            Those of each process.

        Raises:
            RankError: Another one failed or did not come.
        """
        self.refuse_broken()
        mine, self._compared = self._comparison(), self._compared + 1
        texts = {self._rank: json.dumps(facts)}
        self._store.set(f"{mine}/{self._rank}", texts[self._rank])
        for _ in self._looks():
            for rank in [rank for rank in self._others if rank not in texts]:
                if self._store.check([f"{mine}/{rank}"]):
                    texts[rank] = self._store.get(f"{mine}/{rank}").decode()
            if len(texts) == len(self._ranks):
                break
        else:
            silent = self.names(rank for rank in self._others if rank not in texts)
            why = f"{self.me} waited for {silent} to run {facts['the chain']}"
            raise self.failed(why, self.started + 1)
        if self._compared > 2:  # all have read what came two before
            self._store.delete_key(f"{self._comparison(-3)}/{self._rank}")
        return [json.loads(texts[rank]) for rank in range(len(texts))]

    def _comparison(self, further: int = 0) -> str:
        """The key of the next comparison, or of one further on."""
        return f"compare/{self.failures}/{self._compared + further}"

    def wait(self, work: Any, what: str, number: int) -> None:
        """Wait for a collective between tensors of the host.

        Args:
            work: What the collective returned.
            what: Its name, for messages.
            number: How many this process had started with it.

        Raises:
            RankError: It failed, another process failed, or another one runs something else.
        """
        with contextlib.suppress(RuntimeError):  # if it ended since, the last wait says how
            work.wait(datetime.timedelta(seconds=4 * _LOOK))
            return
        ahead = 0.0
        for _ in self._looks(number):
            if work.is_completed():
                break
            # they may have finished this collective already, a moment before this process does
            ahead = ahead or (time.monotonic() if self._ahead() else 0.0)
            if ahead and time.monotonic() - ahead > _BEHIND:
                why = f"{self.me} waits in {what}, {self._what_is_ahead()}"
                raise self.failed(why, number)
        try:
            work.wait()
        except RuntimeError as error:
            why = f"{what} failed on {self.me}: {_first_line(error)}"
            raise self.failed(why, number) from error

    def _ahead(self) -> list[int]:
        """The processes that wait to compare what this process does not."""
        key = self._comparison()
        return [rank for rank in self._others if self._store.check([f"{key}/{rank}"])]

    def _what_is_ahead(self) -> str:
        """What one of those processes runs instead, for messages."""
        rank = self._ahead()[0]
        facts = json.loads(self._store.get(f"{self._comparison()}/{rank}"))
        with_what = ", ".join(f"{k} {v}" for k, v in facts["what it is called with"].items())
        return f"{self.names([rank])} runs something else: {facts['the chain']}, with {with_what}"

    def _looks(self, number: int | None = None) -> Iterator[None]:
        """Look again and again, until the group's timeout or until another process fails.

        A process may fail a moment after what this one waits for, which then still ends. So there
        is one more look after a failure, and a collective that the other reached is waited for.

        Args:
            number: Of the collective that is waited for, which has its own timeout.
        """
        until, pause = time.monotonic() + self._seconds, _LOOK / 100
        failures: list[Any] = []
        while time.monotonic() < until or number is not None:
            yield
            for told in failures:
                if number is None or told["reached"] < number:
                    raise self.failed(f"{self.me} stopped: {told['why']}", number)
            places = f"failed/{self.failures}", "broken"
            keys = [f"{place}/{rank}" for place in places for rank in self._others]
            failures = [json.loads(self._store.get(k)) for k in keys if self._store.check([k])]
            time.sleep(pause)
            pause = min(2 * pause, _LOOK)

    def failed(self, why: str, unfinished: int | None) -> RankError:
        """Tell the others that this process failed, and learn who of them did.

        Args:
            why: A sentence with the name of this process.
            unfinished: The number of the collective that it leaves unfinished, so that the group is
                of no more use; None: there is none.

        Returns:
            The error to raise, which says whom the store shows missing.
        """
        mine, self.failures, self._compared = f"failed/{self.failures}", self.failures + 1, 0
        pending = unfinished is not None
        reached = self.started if unfinished is None else unfinished - 1
        told = {"why": why, "pending": pending, "reached": reached, "started": self.started}
        try:
            self._store.set(f"{mine}/{self._rank}", json.dumps(told))
            silent, until = list(self._others), time.monotonic() + _ANSWER
            while silent and time.monotonic() < until:
                time.sleep(_LOOK)
                for rank in [rank for rank in silent if self._store.check([f"{mine}/{rank}"])]:
                    silent.remove(rank)
                    other = json.loads(self._store.get(f"{mine}/{rank}"))
                    # a collective that one started, and another did not, never ends
                    pending |= other["pending"] or other["started"] != self.started
            if silent or pending:
                self._broken = why
                self._store.set(f"broken/{self._rank}", json.dumps({**told, "reached": -1}))
        except RuntimeError:  # so is the process that holds the store
            self._broken = why
            return RankError(f"{why}; the store is gone, and so is the process that held it")
        return RankError(f"{why}; {self.names(silent)} did not answer" if silent else why)

    def refuse_broken(self) -> None:
        """Refuse to go on after a failure that left a collective unfinished."""
        if self._broken:
            raise RankError(f"its process group cannot be used after a failure: {self._broken}")

    @property
    def is_broken(self) -> bool:
        """Whether a failure left a collective unfinished."""
        return bool(self._broken)

    def names(self, ranks: Any) -> str:
        """Some of its processes, for messages."""
        return " and ".join(f"rank {self._ranks[rank]}" for rank in ranks)


def scatter_into(part: Tensor, whole: Tensor, group: Any = None, async_op: bool = False) -> Any:
    """``torch.distributed``'s reduce-scatter into equal parts.

    That of gloo adds up everything everywhere, and its end is seen only by waiting for it without
    a timeout. There each process gets the parts that it adds up.

    Args:
        part: The part of this process.
        whole: The whole.
        group: The process group; None: all processes.
        async_op: Whether to return what to wait for.
    """
    if is_dynamo_compiling() or not (
        whole.is_cpu and "cpu:gloo" in str(dist.get_backend_config(group))
    ):
        return _scatter_into(part, whole, group=group, async_op=async_op)
    parts = torch.empty_like(whole)
    work = _Summed(dist.all_to_all_single(parts, whole, group=group, async_op=True), parts, part)
    return work if async_op else work.wait()


class _Summed:
    """An exchange whose parts are added up once they are there; it is waited for like others."""

    def __init__(self, work: Any, parts: Tensor, total: Tensor) -> None:
        self._work, self._parts, self._total = work, parts, total

    def is_completed(self) -> bool:
        """Whether the parts are there, or it failed."""
        return bool(self._work.is_completed())

    def wait(self, *timeout: Any) -> None:
        """Wait for the parts, and add them up."""
        self._work.wait(*timeout)
        if self._total.numel():
            parts = self._parts.view(-1, *self._total.shape)
            torch.sum(parts, 0, dtype=self._total.dtype, out=self._total)


class Pending:
    """A collective that runs; its tensors must not be read before :meth:`wait`.

    Args:
        work: What the function of ``torch.distributed`` returned.
        what: Its name, for messages.
        talk: What the processes say to each other, if the host has to wait for it.
        tensors: Its tensors, which live as long.
    """

    def __init__(self, work: Any, what: str, talk: Talk | None, tensors: tuple[Any, ...]) -> None:
        self._work, self._what, self._talk, self._tensors = work, what, talk, tensors
        if talk is not None:
            talk.started += 1
            self._number = talk.started

    def wait(self) -> None:
        """Let what follows find the result: on the host, or in the current stream of a GPU.

        Raises:
            RankError: See :meth:`Talk.wait`.
        """
        if self._talk is not None:
            self._talk.wait(self._work, self._what, self._number)
        elif self._work is not None:
            self._work.wait()
        self._work, self._talk, self._tensors = None, None, ()


def start_collective(group: Group, what: str, start: Callable[..., Any], *tensors: Any) -> Pending:
    """Start a collective of ``torch.distributed``, and go on.

    All processes must start the collectives of a group in one order.

    Args:
        group: The process group.
        what: Its name, for messages.
        start: The function, which takes ``group`` and ``async_op``.
        *tensors: Its other arguments.

    Raises:
        RankError: It cannot be started, or the group failed before.
    """
    talk = _waiting(group, tensors)
    try:
        work = start(*tensors, group=group.given, async_op=True)
    except RuntimeError as error:
        if talk is None:
            raise
        why = f"{what} failed on {talk.me}: {_first_line(error)}"
        raise talk.failed(why, talk.started + 1) from error
    return Pending(work, what, talk, tensors)


def run_collective(group: Group, what: str, start: Callable[..., Any], *tensors: Any) -> None:
    """Run a collective of ``torch.distributed`` and wait for it.

    Args:
        group: The process group.
        what: Its name, for messages.
        start: The function, which takes ``group`` and ``async_op``.
        *tensors: Its other arguments.

    Raises:
        RankError: See :meth:`Talk.wait`.
    """
    if _waiting(group, tensors) is None:
        start(*tensors, group=group.given)
    else:
        start_collective(group, what, start, *tensors).wait()


def _waiting(group: Group, given: Iterable[Any]) -> Talk | None:
    """The talk of a group, if the host waits: on a GPU it goes on, and a watchdog waits."""
    if is_dynamo_compiling():  # a graph runs without it
        return None
    talk = group.talk
    if talk is not None:
        talk.refuse_broken()
    on_host = all([each.is_cpu for each in given if isinstance(each, Tensor)])
    return talk if talk is not None and on_host and talk.looks else None


def first_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """The first difference between the facts of two processes; ``""``: there is none."""
    for what, mine in one.items():
        theirs = other.get(what)
        if mine == theirs:
            continue
        if isinstance(mine, dict) and isinstance(theirs, dict):
            key = min(key for key in {*mine, *theirs} if mine.get(key) != theirs.get(key))
            what, mine, theirs = f"{what}: {key}", mine.get(key, "none"), theirs.get(key, "none")
            return f"{what}: {' '.join(str(mine).split())} against {' '.join(str(theirs).split())}"
        return f"{what}: {mine!r} against {theirs!r}"
    return ""


def _seconds(group: Any) -> float:
    """The timeout of a group."""
    for device in group._device_types:
        return float(group._get_backend(device).options._timeout.total_seconds())
    return float(dist.default_pg_timeout.total_seconds())  # threads that simulate processes


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
