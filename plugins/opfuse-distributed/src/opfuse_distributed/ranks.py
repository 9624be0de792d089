"""The processes of a group: an error on each of them, and no hang.

A chain with collectives runs on every process of a group. Where one runs something else, or fails,
the others would wait for it, or mix up their numbers. So calls and collectives are *turns*, which
all processes take in one order. Each process predicts its next turn from those that all of them
took, by one rule, so that all predict the same. One that takes the predicted turn goes on. Any
other turn is compared through the store of ``torch.distributed`` first: a collective would wait for
the very process that is missing. So either all took the predicted turn, or all compare, or some
compare while others are in a collective that nobody joins; those look into the store, and see it.
One that fails says so in the store, too.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from opfuse.core.errors import CallRefusedError
from opfuse.tuning.causes import first_difference

# torch 2.13 renamed them, and warns of the old names
gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""``torch.distributed``'s all-gather of equal parts; takes the whole, and the part."""
_scatter_into: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_LOOK = 0.05  # seconds between two looks into the store
_ANSWER = 5.0  # seconds in which the others say that they failed too
_BEFORE = "the turns before it"
_ERA = 1 << 40  # turns, at most, before they are forgotten
_KEPT = 1 << 14  # turns, at least, by which the next one is predicted
_talks: WeakKeyDictionary[Any, Talk | None] = WeakKeyDictionary()  # by group


class RankError(CallRefusedError):
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
        order: How many were made before, copies too.

    Raises:
        TypeError: It is not a process group.
        ValueError: This process is not in it.
    """

    _made: ClassVar[Iterator[int]] = itertools.count()

    def __init__(self, given: Any) -> None:
        wanted = "expected a process group that has this process, got"
        if given is not None and given == dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(f"{wanted} one without it")
        if given is not None and not isinstance(given, dist.ProcessGroup):
            raise TypeError(f"{wanted} {given!r}")
        self.given, self.size = given, dist.get_world_size(given)
        self.order = next(Group._made)
        if self.size < 1:
            raise ValueError(f"{wanted} one without it")

    def __deepcopy__(self, memo: Any) -> Group:
        twin = object.__new__(Group)
        vars(twin).update(vars(self), order=next(Group._made))
        return twin

    def __reduce__(self) -> tuple[type[Group], tuple[None]]:
        if self.given is not None:
            how = "save its state_dict, and make it again where that is loaded"
            raise TypeError(f"an op that holds a process group cannot be pickled: {how}")
        return Group, (None,)

    @contextlib.contextmanager
    def comparing_once(self, what: str) -> Iterator[None]:
        """A block whose collectives are compared once, whatever they take.

        Args:
            what: Its name, for messages.
        """
        before, state.running = state.running, Pass(what, None, {})
        try:
            yield
        finally:
            state.running = before

    def largest(self, number: float, device: torch.device) -> float:
        """The largest of a number that each process has."""
        value = torch.tensor(number, dtype=torch.float64, device=device)
        run_collective(self, "the largest", dist.all_reduce, value, dist.ReduceOp.MAX)
        return float(value)

    def exchange(self, facts: dict[str, Any]) -> list[Any]:
        """Facts of all processes, see :meth:`Talk.exchange`; of a simulated one, its own."""
        return [facts] if self.talk is None else self.talk.exchange(facts)

    @property
    def talk(self) -> Talk | None:
        """What its processes say to each other; None: they are simulated, or only one."""
        group: Any = self.given or dist.group.WORLD
        try:
            return _talks[group]
        except KeyError:
            alone = self.size == 1 or "fake" in dist.get_backend(group)
            return _talks.setdefault(group, None if alone else Talk(group))


class _State(threading.local):
    """What runs in a thread.

    Attributes:
        running: The :class:`Pass` that runs, or None.
        told: The errors that the other processes of a group were told of in the outermost block
            that tells them, each with its :class:`Talk`; None: there is none.
    """

    running: Pass | None = None
    told: list[tuple[Talk, BaseException]] | None = None


state = _State()
"""What runs in this thread."""


class Pass:
    """A pass of a chain with collectives, while it runs.

    Attributes:
        name: ``"forward"`` or ``"backward"``.
        chain: The chain.
        turns: The turn of the call, by :class:`Talk`; it says which call a backward belongs to.
        size: The number of elements of the chain's input; 0: there is no chain, and the pass is
            compared once, whatever its collectives take.
        compared: The eras in which something of the pass was compared.
    """

    def __init__(self, name: str, chain: Any, turns: dict[Any, int], size: int = 0) -> None:
        self.name, self.chain, self.turns, self.size = name, chain, turns, size
        self.compared: list[object] = []


class Talk:
    """What the processes of one group say to each other.

    Attributes:
        looks: Whether a process that waits for a collective can look into the store meanwhile.
        started: How many collectives this process started, that the host waits for.
        me: This process, for messages.
        broken: The failure that left a collective unfinished; empty: there was none.
        turn: The number of the next turn.
        era: An object of the time since they last forgot their turns.
        failures: How many there were, of this process or of another one. What is compared before
            one is not read after it.

    Args:
        group: The group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._rank, self._seconds = dist.get_rank(group), _seconds(group)
        self._ranks = dist.get_process_group_ranks(group)
        self.me = f"rank {self._ranks[self._rank]}"
        self._others = [rank for rank in range(len(self._ranks)) if rank != self._rank]
        default, name = dist.distributed_c10d._get_default_store(), f"opfuse/{group.group_name}"
        # a store may outlive a group, and the next one has its name
        number = default.add(f"{name}/groups/{self._rank}", 1)
        self._store = dist.distributed_c10d.PrefixStore(f"{name}/{number}", default)
        # its waits may end before the collective
        self.looks = "gloo" in str(dist.get_backend_config(group))
        self.started = self.failures = self._compared = self.turn = 0
        self.broken = ""
        self._forget()

    def _forget(self) -> None:
        """Forget all turns, as all processes do at once: what comes next is new to each."""
        # no number twice: a backward may belong to a call from before
        self.turn, self.era = (self.turn // _ERA + 1) * _ERA, object()
        self._past: list[Any] = []  # the turns
        self._latest: dict[Any, int] = {}  # where in the past a turn, or one by its name, was last
        self._kinds = set[Any]()  # of the collectives that were compared, see _follows
        # where in the past the next turn is, if it is there; a checksum of what is compared later
        self._predicted = self._deferred = 0
        self._numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._count, self._orders = itertools.count(1), list[int]()

    def take_turn(self, group: Group, turn: Any) -> None:
        """Go on with a turn if it is the predicted one, and compare it otherwise.

        The past is followed from where a turn like the last one was. So a process knows a step
        after it ran once. In a pass of a chain one comparison is enough if its collectives were
        compared before, with any number of rows: what follows is compared with the next one.

        Args:
            group: The group.
            turn: Its name and its details, see :func:`facts_of`; equal on all processes.

        Raises:
            RankError: Another process takes another turn, failed, or did not come.
        """
        past, place = self._past, self._predicted
        if not past or past[place] != turn:
            if (running := state.running) is not None and self._follows(turn, running):
                self._deferred = zlib.crc32(repr(turn).encode(), self._deferred)
            else:
                self._compare({**facts_of(turn), "its place among those made": self._place(group)})
                if running is not None:
                    running.compared.append(self.era)
            place = self._latest.get(turn, self._latest.get(turn[0], len(past)))
        else:
            turn = past[place]  # not the same twice in memory
        self._latest[turn] = self._latest[turn[0]] = len(past)
        past.append(turn)
        self.turn, self._predicted = self.turn + 1, (place + 1) % len(past)
        if len(past) > 2 * _KEPT:  # a place before the first one predicts wrongly, but alike
            del past[:_KEPT], self._orders[_KEPT:]
            self._predicted -= _KEPT
            self._latest = {t: i - _KEPT for t, i in self._latest.items() if i >= _KEPT}

    def _follows(self, turn: Any, running: Pass) -> bool:
        """Whether a turn follows from what was compared: in its pass, and of its kind before.

        What a collective takes, other than the number of rows, is part of its kind, since an op may
        give anything. All processes have compared the same kinds.
        """
        begun = self.era in running.compared
        if not running.size or not isinstance(turn[1][1], tuple):  # tuning, or a call
            return begun
        takes = tuple([(dtype, numel / running.size) for dtype, numel in turn[1][1]])
        kind = turn[0], self.number(running.chain.ops[0]), takes
        known = kind in self._kinds
        if len(self._kinds) > _KEPT:
            self._kinds.clear()
        self._kinds.add(kind)
        return begun and known

    def number(self, op: Any) -> int:
        """The number of an op, or of a group that an op holds, in the order of their first use."""
        return self._numbers.get(op) or self._numbers.setdefault(op, next(self._count))

    def _place(self, group: Group) -> int:
        """How many of the groups that were compared were made before this one."""
        self._orders = sorted({*self._orders, group.order})
        return self._orders.index(group.order)

    def _compare(self, facts: Mapping[str, Any]) -> None:
        """Compare facts with the other processes, all of which must come here.

        Args:
            facts: What must be the same, as JSON-able data; causes come before effects.

        Raises:
            RankError: They differ, on every process alike; or another one failed or did not come.
        """
        first, *others = self.exchange(facts)
        for rank, of_rank in zip(self._ranks[1:], others, strict=True):
            if difference := first_difference(first, of_rank):
                why = f"rank {self._ranks[0]} and rank {rank} differ in {difference}"
                if any(first[_BEFORE] != other[_BEFORE] for other in others):
                    self.broken = why  # some took turns that others did not
                self._forget()
                raise RankError(why)

    def exchange(self, facts: Mapping[str, Any]) -> list[Any]:
        """Give facts to the other processes, all of which must come here.

        Args:
            facts: JSON-able data, among it ``"what runs"``.

        Returns:
            Those of each process.

        Raises:
            RankError: Another one failed or did not come.
        """
        if self.broken:
            raise RankError(f"its process group cannot be used after a failure: {self.broken}")
        mine, self._compared = self._comparison(), self._compared + 1
        texts = {self._rank: json.dumps({**facts, _BEFORE: [self.turn, self._deferred]})}
        self._store.set(f"{mine}/{self._rank}", texts[self._rank])
        for _ in self._looks():
            for rank in [rank for rank in self._others if rank not in texts]:
                if self._store.check([f"{mine}/{rank}"]):
                    texts[rank] = self._store.get(f"{mine}/{rank}").decode()
            if len(texts) == len(self._ranks):
                break
        else:
            silent = self.names(rank for rank in self._others if rank not in texts)
            why = f"{self.me} waited for {silent} to run {facts['what runs']}"
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
        for _ in self._looks(number):
            if work.is_completed():
                break
            if difference := self._difference():
                raise self.failed(f"{self.me} waits in {what}; {difference}", number)
        try:
            work.wait()
        except RuntimeError as error:
            why = f"{what} failed on {self.me}: {_first_line(error)}"
            raise self.failed(why, number) from error

    def _difference(self) -> str:
        """How a turn of this process differs from what another one compares; ``""``: in nothing."""
        for rank in self._others:
            if self._store.check([key := f"{self._comparison()}/{rank}"]):
                theirs = json.loads(self._store.get(key))
                # one that is ahead has ended this collective
                if (back := self.turn - theirs[_BEFORE][0]) > 0:
                    mine = facts_of(self._past[-min(back, len(self._past))])
                    difference = first_difference(mine, theirs)
                    return f"{self.me} and {self.names([rank])} differ in {difference}"
        return ""

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
        self._forget()
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
                self.broken = why
                self._store.set(f"broken/{self._rank}", json.dumps({**told, "reached": -1}))
        except RuntimeError:  # so is the process that holds the store
            self.broken = why
            return RankError(f"{why}; the store is gone, and so is the process that held it")
        return RankError(f"{why}; {self.names(silent)} did not answer" if silent else why)

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


def start_collective(
    group: Group, what: str, start: Callable[..., Any], *tensors: Any, later: bool = True
) -> Pending:
    """Start a collective of ``torch.distributed``, and go on.

    All processes must start the collectives of a group in one order.

    Args:
        group: The process group.
        what: Its name, for messages.
        start: The function, which takes ``group`` and ``async_op``.
        *tensors: Its other arguments.
        later: Whether it is waited for later. If not, it need not go on beside other work.

    Raises:
        RankError: It cannot be started, or another process starts something else, or failed.
    """
    talk = take_turn(group, what, tensors)
    try:
        # the host can look around meanwhile
        work = start(*tensors, group=group.given, async_op=later or talk is not None)
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
        RankError: See :meth:`Talk.take_turn` and :meth:`Talk.wait`.
    """
    start_collective(group, what, start, *tensors, later=False).wait()


def take_turn(group: Group, what: str, given: tuple[Any, ...]) -> Talk | None:
    """Take the turn of a collective, see :meth:`Talk.take_turn`.

    Args:
        group: The process group.
        what: Its name, for messages.
        given: What it takes.

    Returns:
        The talk of the group, if the host waits: on a GPU it goes on, and a watchdog waits.

    Raises:
        RankError: Another process does something else, or failed.
    """
    talk = None if is_dynamo_compiling() else group.talk  # a graph runs without it
    if talk is None:
        return None
    running, tensors = state.running, [each for each in given if isinstance(each, Tensor)]
    name: Any = what, "", "", talk.number(group) if running is None else 0
    if running is not None and talk in running.turns:
        name = what, running.name, running.chain.title, talk.turn - running.turns[talk]
    sizes = tuple([(t.dtype, t.numel()) for t in tensors])
    uneven = list in map(type, given)  # each process has sizes of its own
    talk.take_turn(group, (name, ("{}", () if uneven else sizes)))
    return talk if talk.looks and all([t.is_cpu for t in tensors]) else None


def facts_of(turn: Any) -> dict[str, Any]:
    """What is compared of a turn: of a collective, or of the call of a chain."""
    (what, pass_name, chain, place), (text, tensors) = turn
    title = f"{what} in the {pass_name} of {chain}" if pass_name else what
    own = {"its place in the order of calls": str(place), "its tensors": str(tensors)}
    return {"what runs": title, **json.loads(text), **own}


def _seconds(group: Any) -> float:
    """The timeout of a group."""
    for device in group._device_types:
        return float(group._get_backend(device).options._timeout.total_seconds())
    return float(dist.default_pg_timeout.total_seconds())  # threads that simulate processes


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
