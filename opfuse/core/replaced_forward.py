"""What a module says about the chain that runs in place of its forward.

A conversion, such as that of the package opfuse-convert, gives modules of a model a forward that
runs a chain. It keeps a :class:`ReplacedForward` with each of them, under :data:`KEPT_AS` in the
module's ``vars()``, where it is no child of the module. All that the rest of opfuse does with such
modules goes through it: ``opfuse.explain`` prints it, ``opfuse.tune`` measures it, and
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
"""Under which name a module keeps its :class:`ReplacedForward`."""


class ReplacedForward(ABC):
    """The two ways to run one module: by way of a chain, or by its own operations.

    Where both ways are open, the forward tells ``opfuse.core.settings.current.recorder``, if there
    is one, by its method ``replaced``. Without that ``opfuse.tune`` measures nothing.

    Attributes:
        fallback: Why the module's own forward ran at the latest call, as a sentence; ``""``: the
            chain did, or there was no call.
        off: Whether the module's own forward runs, whatever else.
        plugin: Distribution and version of the package that knows the module; None: nobody's.
    """

    fallback: str = ""
    off: bool = False
    plugin: tuple[str, str] | None = None

    @property
    @abstractmethod
    def chain(self) -> nn.Sequential | None:
        """The chain, an :class:`opfuse.Sequential`; None: it is made at the first call."""

    @abstractmethod
    def own_operations(self, module: nn.Module, *given: Tensor) -> Any:
        """What the chain computes, in the module's own operations.

        Args:
            module: The module.
            *given: What the chain gets: its input and extra inputs.
        """

    @abstractmethod
    def parameters(self, module: nn.Module) -> Sequence[Tensor]:
        """The parameters that both ways read."""

    @abstractmethod
    def subject(self, module: nn.Module, x: Tensor, compiled: bool) -> dict[str, Any]:
        """What an entry of the tuning table is of, as JSON-able data.

        Args:
            module: The module.
            x: The input of the chain.
            compiled: Whether it is for calls that ``torch.compile`` traces.
        """

    @abstractmethod
    def gives_way(self, found: Measurement, compiled: bool) -> bool:
        """Whether the module's own operations run from now on, by what was measured."""


def replaced_forward(module: nn.Module) -> ReplacedForward | None:
    """The one that a module keeps, or None."""
    return vars(module).get(KEPT_AS)


def replaced_forwards(model: nn.Module) -> Iterator[tuple[str, nn.Module, ReplacedForward]]:
    """Those of the modules of a model, each with the module's dotted name and the module."""
    for path, module in model.named_modules():
        found = replaced_forward(module)
        if found is not None:
            yield path, module, found
