"""The interface of a module whose forward was replaced by a chain.

A conversion, such as that of the package opfuse-convert, gives modules of a model a forward that
runs a chain. It stores a :class:`ReplacedForward` with each of them, under :data:`KEPT_AS` in the
module's ``vars()``, so that it is not a child of the module. The rest of opfuse deals with such
modules only through it: ``opfuse.explain`` prints it, ``opfuse.tune`` measures it, and
``opfuse.assign_names`` names the ops of its chain.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

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
        plugin: Distribution and version of the package that knows the module; None: there is none.
    """

    fallback: str = ""
    off: bool = False
    plugin: tuple[str, str] | None = None

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
