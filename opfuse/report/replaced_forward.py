"""The interface of a module whose forward was replaced by a chain.

A conversion, such as that of the package opfuse-convert, gives modules of a model a forward that
runs a chain. It stores a :class:`ReplacedForward` with each of them, under :data:`KEPT_AS` in the
module's ``vars()``, so that it is not a child of the module. The rest of opfuse deals with such
modules only through it: ``opfuse.explain`` prints it, ``opfuse.tune`` measures it, and
``opfuse.assign_names`` names the ops of its chain. The module's state dict has the state of the
chain's quantizers, by :meth:`ReplacedForward.save` and :meth:`ReplacedForward.load`.
"""

from __future__ import annotations

import copy
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn

from ..core.op import BasicOperation

if TYPE_CHECKING:
    from ..tuning.table import Measurement

KEPT_AS = "_opfuse"
"""The name in the ``vars()`` of a module under which it keeps its :class:`ReplacedForward`."""

MEMORY = "_opfuse_memory"
"""The name under which a module keeps what it does by ``opfuse.plan_memory``, as an object whose
``str()`` says it."""

_STATES: weakref.WeakKeyDictionary[nn.Module, dict[Any, Any]] = weakref.WeakKeyDictionary()
"""For each module that ops of chains read from, their quantizers; other chains have the same."""


R = TypeVar("R", bound="ReplacedForward")


class ReplacedForward(ABC):
    """The two ways to run one module: through a chain, or by its own operations.

    If both ways are possible, the forward must call the method ``replaced`` of
    ``opfuse.core.settings.current.recorders``, if there are any. Otherwise ``opfuse.tune`` measures
    nothing.

    Attributes:
        fallback: A sentence that says why the module's own forward ran at the latest call; ``""``:
            the chain ran, or there was no call.
        off: Whether the module's own forward always runs.
        waiting: Entries of a checkpoint for a chain that is not made yet; None: none was loaded.
        plugin: Distribution and version of the package that knows the module; None: there is none.
        path: The module's dotted name in the model that was prepared; None: none was.
    """

    fallback: str = ""
    off: bool = False
    plugin: tuple[str, str] | None = None
    waiting: dict[str, Any] | None = None
    path: str | None = None
    _copied: Sequence[Any] = ()  # quantizers of a copy without a chain yet

    def save(self, destination: dict[str, Any], prefix: str, keep_vars: bool = False) -> None:
        """Write the state of the chain's quantizers into a state dict.

        Each part of a key is an attribute, of the module first, for those who look for it so.

        Args:
            destination: The state dict.
            prefix: The prefix of the module's keys.
            keep_vars: As for ``torch.nn.Module.state_dict``.
        """
        root = f"{prefix}{KEPT_AS}.chain."
        destination.update({root + key: value for key, value in (self.waiting or {}).items()})
        for name, states, _ in self._states():
            states.save(destination, f"{root}{name}.", keep_vars)

    def load(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Take what :meth:`save` writes out of a state dict, or let it wait for the chain."""
        root = f"{prefix}{KEPT_AS}.chain."
        self.waiting, self._copied = None, ()
        for name, states, _ in self._states():
            states.load(state_dict, f"{root}{name}.")
        if self.chain is None:
            keys = [key for key in state_dict if key.startswith(root)]
            self.waiting = {key[len(root) :]: state_dict.pop(key).clone() for key in keys}

    def states(self) -> list[Any]:
        """The quantizers of each op of the chain."""
        return [states for _, states, _ in self._states()]

    def restoring(self) -> Callable[[], None]:
        """What puts back the state of a chain that is made from now on: it waits again."""
        return partial(self._unmake, self.waiting, self.states())

    def _unmake(self, waiting: dict[str, Any] | None, known: list[Any]) -> None:
        for states in [states for states in self.states() if states not in known]:
            states.forget()
            BasicOperation._count_change()  # plans have quantizers that are put away
        self._load_waiting(waiting)

    @property
    def has_state(self) -> bool:
        """Whether quantizers of the chain have state, or some waits for it."""
        return bool(self.waiting) or any(states.has_state for states in self.states())

    def settle(self, module: nn.Module) -> None:
        """Give a chain that was made after the model was prepared its names and its state."""
        if self.path is not None:
            parts = module.named_modules(prefix=self.path)
            for op, name in self.names({part: name for name, part in parts}):
                op._set_name("_path", name)
        waiting, self._copied = self.waiting, ()
        self.share()
        self._load_waiting(waiting)

    def _load_waiting(self, waiting: dict[str, Any] | None) -> None:
        """Load entries that waited for the chain, if any did."""
        if waiting is not None:
            self.load({f"{KEPT_AS}.chain.{key}": value for key, value in waiting.items()}, "")

    def share(self) -> None:
        """Give the ops of a new chain, which have names, the quantizers of those that read alike.

        An op that cannot have those of the modules that it reads from starts over, and says so.
        """
        for op, key in zip([op for _, op in self._ops()], self._keys(), strict=True):
            held = [_STATES.setdefault(module, {}) for module, _ in key[1]]
            found = held[0].get(_weak(key)) if held else None
            if found is not None and found.name in (None, op.name):
                op._quantizers = found
                continue
            if any(each.has_state or each.was_loaded for of in held for each in of.values()):
                op._quantizers.load({}, "")
            for of in held:
                of[_weak(key)] = op._quantizers

    def copied(self, twin: R, memo: dict[int, Any]) -> R:
        """Give copies of the quantizers to the same for a copy of the module, without a chain yet.

        Args:
            twin: That.
            memo: The copies by the ids of what was copied, as of ``copy.deepcopy``.
        """
        twin.path, twin.waiting, found = self.path, self.waiting, []
        for name, states, (cls, read, number) in self._states():
            reads = tuple([(memo[id(m)], key) for m, key in read if id(m) in memo])
            found.append((name, copy.deepcopy(states, memo), (cls, reads, number)))
            for module, _ in reads if len(reads) == len(read) else ():
                _STATES.setdefault(module, {})[_weak(found[-1][2])] = found[-1][1]
        twin._copied = found
        return twin

    def apply(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Move the state of the chain as ``nn.Module._apply`` moves the module."""
        for _, op in self._ops():
            op._move_state(fn)
        for _, states, _ in self._copied:
            states.apply(fn)

    def names(self, paths: dict[nn.Module, str]) -> Iterator[tuple[Any, str]]:
        """The ops of the chain with their names: of the modules they read from, or :attr:`path`.

        Args:
            paths: The dotted names of modules.
        """
        chain: Any = self.chain or ()
        for op in chain:
            read = [source.module for source in op._sources.values()]
            name = next((paths[each] for each in read if each in paths), self.path or "")
            if op._quantizers.name in (None, name) or not self.is_out_of_date:
                yield op, name

    def _states(self) -> Sequence[tuple[str, Any, Any]]:
        """The quantizers of the ops of the chain, with name and key; of a copy, those it got."""
        ops = zip(self._ops(), self._keys(), strict=True)
        return [(n, op._quantizers.refresh(op), key) for (n, op), key in ops] or self._copied

    def _keys(self) -> list[tuple[type, tuple[tuple[nn.Module, str], ...], int]]:
        """What tells the quantizers of ops apart: class, what it reads, the how many-th of these.

        It reads nothing if it has no quantizers.
        """
        keys: list[Any] = []
        for _, op in self._ops():
            sources = op._sources.values() if op.num_quantizers("forward") else ()
            of = type(op), tuple([(source.module, source.name) for source in sources])
            keys.append((*of, sum(key[:2] == of for key in keys)))
        return keys

    def _ops(self) -> list[tuple[str, Any]]:
        """The ops of the chain, by name."""
        modules = () if self.chain is None else self.chain.named_modules()
        return [(name, op) for name, op in modules if isinstance(op, BasicOperation)]

    @property
    def is_out_of_date(self) -> bool:
        """Whether the module has changed since, so that its own forward runs."""
        return False

    @property
    @abstractmethod
    def chain(self) -> nn.Sequential | None:
        """The chain, an :class:`opfuse.Sequential`; None before the first call makes it."""

    @property
    def chains(self) -> Sequence[Any]:
        """All chains that a call of the module runs; :attr:`chain` is the first."""
        return (self.chain,)

    @property
    def reason(self) -> str:
        """Why its own forward, or a part of it, ran at the latest call; ``""``: chains ran."""
        return self.fallback

    @abstractmethod
    def own_operations(self, module: nn.Module, *given: Tensor) -> Any:
        """Compute the result of the chain by the module's own operations.

        Args:
            module: The module.
            *given: The input and the extra inputs of the chain.
        """

    @abstractmethod
    def parameters(self, module: nn.Module) -> Sequence[Tensor]:
        """The parameters that both ways read."""

    @abstractmethod
    def subject(self, module: nn.Module, x: Tensor, compiled: bool) -> dict[str, Any]:
        """The subject of an entry of the tuning table, as JSON-able data.

        Args:
            module: The module.
            x: The input of the chain.
            compiled: Whether the entry is for calls that ``torch.compile`` traces.
        """

    @abstractmethod
    def declines(self, found: Measurement, compiled: bool) -> bool:
        """Whether the module's own operations run from now on, by what was measured."""


def _weak(key: Any) -> Any:
    """A key that keeps no module alive."""
    cls, read, number = key
    return cls, tuple([(weakref.ref(module), name) for module, name in read]), number


def replaced_forward(module: nn.Module) -> ReplacedForward | None:
    """The :class:`ReplacedForward` of a module, or None."""
    return vars(module).get(KEPT_AS)


def replaced_forwards(model: nn.Module) -> Iterator[tuple[str, nn.Module, ReplacedForward]]:
    """Yield the dotted name, the module and the :class:`ReplacedForward` of each such module."""
    for path, module in model.named_modules():
        if (found := replaced_forward(module)) is not None:
            yield path, module, found
