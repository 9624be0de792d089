"""The interface of a module whose forward was replaced by a chain.

A conversion, such as that of the package opfuse-convert, gives modules of a model a forward that
runs a chain. It stores a :class:`ReplacedForward` with each of them, under :data:`KEPT_AS` in the
module's ``vars()``, so that it is not a child of the module. The rest of opfuse deals with such
modules only through it: ``opfuse.explain`` prints it, ``opfuse.tune`` measures it, and
``opfuse.assign_names`` names the ops of its chain. The module's state dict has the state of the
chain's quantizers, by :meth:`ReplacedForward.save` and :meth:`ReplacedForward.load`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from .op import BasicOperation

if TYPE_CHECKING:
    from .tuning_table import Measurement

KEPT_AS = "_opfuse"
"""The name under which a module keeps its :class:`ReplacedForward`."""
MEMORY = "_opfuse_memory"
"""The name under which a module keeps what it does by ``opfuse.plan_memory``, as an object whose
``str()`` says it."""


class ReplacedForward(ABC):
    """The two ways to run one module: through a chain, or by its own operations.

    If both ways are possible, the forward must call the method ``replaced`` of
    ``opfuse.core.settings.current.recorder``, if there is one. Otherwise ``opfuse.tune`` measures
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
        for name, op in self._ops():
            op._quantizers.following(op).save(destination, f"{root}{name}.", keep_vars)

    def load(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Take what :meth:`save` writes out of a state dict, or let it wait for the chain."""
        root = f"{prefix}{KEPT_AS}.chain."
        self.waiting = None
        for name, op in self._ops():
            op._quantizers.following(op).load(state_dict, f"{root}{name}.")
        if self.chain is None:
            keys = [key for key in state_dict if key.startswith(root)]
            self.waiting = {key[len(root) :]: state_dict.pop(key).clone() for key in keys}

    def state(self) -> dict[str, Any] | None:
        """The entries of :meth:`save`, for :meth:`load` of another chain of the same module.

        None: there are none, and nothing was loaded.
        """
        entries: dict[str, Any] = {}
        self.save(entries, "")
        loaded = any(op._quantizers.was_loaded for _, op in self._ops())
        return entries if entries or loaded or self.waiting is not None else None

    def apply(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Move the state of the chain as ``nn.Module._apply`` moves the module."""
        for _, op in self._ops():
            op._move_state(fn)

    def names(self, paths: dict[nn.Module, str]) -> Iterator[tuple[Any, str]]:
        """The ops of the chain with their names: of the modules they read from, or :attr:`path`.

        Args:
            paths: The dotted names of modules.
        """
        chain: Any = self.chain or ()
        for op in chain:
            read = [source.module for source in op._sources.values()]
            yield op, next((paths[each] for each in read if each in paths), self.path or "")

    def rename(self, module: nn.Module) -> None:
        """Name the ops of a chain that was made after the model was prepared."""
        if self.path is not None:
            parts = module.named_modules(prefix=self.path)
            for op, name in self.names({part: name for name, part in parts}):
                op._set_name("_path", name)

    def _ops(self) -> list[tuple[str, Any]]:
        """The ops of the chain, by name."""
        modules = () if self.chain is None else self.chain.named_modules()
        return [(name, op) for name, op in modules if isinstance(op, BasicOperation)]

    @property
    @abstractmethod
    def chain(self) -> nn.Sequential | None:
        """The chain, an :class:`opfuse.Sequential`; None before the first call makes it."""

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


def replaced_forward(module: nn.Module) -> ReplacedForward | None:
    """The :class:`ReplacedForward` of a module, or None."""
    return vars(module).get(KEPT_AS)


def replaced_forwards(model: nn.Module) -> Iterator[tuple[str, nn.Module, ReplacedForward]]:
    """Yield the dotted name, the module and the :class:`ReplacedForward` of each such module."""
    for path, module in model.named_modules():
        found = replaced_forward(module)
        if found is not None:
            yield path, module, found
