"""The declarations of a plugin about modules whose forwards chains can replace."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from .grammar import Place


@dataclasses.dataclass(frozen=True)
class Conversion:
    """The replacement of the forward of one module.

    Args:
        chain: An :class:`opfuse.Sequential`. Its ops read the parameters of the module's children
            (``BasicLinear.reading`` and the like), so that both have the same.
        reads: Dotted names, below the module, of the children that the chain replaces. It does not
            call them: if one of them has hooks, was replaced or has another ``forward``, the
            module's own forward runs. ``""`` is the module itself.
        call: ``call(module, chain, *args, **kwargs)`` is the module's forward through the chain:
            it takes and returns what that does, or returns ``NotImplemented``, before it changes
            anything, to let the original run. There ``chain(x, *extras)`` runs the chain. If it has
            an attribute ``why``, that says after a call why the chain did not run; ``""``: it did.
        separate: ``separate(module, x, *extras)`` computes in the module's own operations what the
            chain computes. With it, ``chain(x, *extras)`` runs these instead where the dtypes are
            not those of the parameters, and where ``opfuse tune`` found them to be faster.
        constants: ``(name, attribute)`` pairs of children (``""``: the module) whose value the
            chain has copied, such as the ``eps`` of a norm. If one changes, the module's own
            forward runs.
        probed: Whether something in it was recognised by its values, not by its class. It is then
            compared with the module before it is used.
        places: Further places whose values the chain depends on, as recorded by
            :class:`opfuse_convert.grammar.Reader`. If one changes, the module's own forward runs.
        splits: How those of the children are split among processes that are: the chain reads the
            part of its own process. Each is an ``opfuse_distributed.parallel.Split``.
        shapes: Shapes of the module's own parameters in a call, by name, if a style has replaced
            its forward by one that calls its own with local parameters. The chain replaces that.
        function: The function that the chain is for, if that is not the forward of the class, but
            among those of the module's own (:func:`opfuse_convert.functions_of`).
        called: Names of those of the children that ``call`` calls around the chain, so that their
            hooks run, and gather what FSDP2 has sharded. It refuses the hooks that it does not
            know, and parameters that are none of its process.
        also: Further chains that ``call`` runs, without parameters; the report names their ops.
        parts: A :class:`Converter` for some of the children, by name, which their place in the
            module decides. Each is asked as if it were for that child.

    Raises:
        TypeError: ``chain`` is not a :class:`opfuse.Sequential`, or ``call`` is not a function.
    """

    chain: nn.Sequential
    reads: Sequence[str]
    call: Callable[..., Any]
    separate: Callable[..., Any] | None = None
    constants: Sequence[tuple[str, str]] = ()
    probed: bool = False
    places: Sequence[Place] = ()
    splits: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    shapes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    function: Any = None
    called: Sequence[str] = ()
    also: Sequence[nn.Sequential] = ()
    parts: Mapping[str, Converter] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.chain, nn.Sequential):
            raise TypeError(
                f"Conversion expected an opfuse.Sequential as chain, got {self.chain!r}"
            )
        if not callable(self.call):
            raise TypeError(f"Conversion expected a function as call, got {self.call!r}")
        object.__setattr__(self, "reads", tuple(self.reads))
        object.__setattr__(self, "constants", tuple(self.constants))


@dataclasses.dataclass(frozen=True)
class Converter:
    """The declaration that chains can replace the forwards of modules of a kind.

    Args:
        target: The modules: a class (exactly that; classes that torch derives for parametrization
            or FSDP count as the original), its dotted name, such as
            ``"transformers.models.llama.modeling_llama.LlamaMLP"``, so that nothing is imported for
            it, or a function that says so for a module.
        build: ``build(module, env)`` gives a :class:`Conversion`, or a sentence that says why not.
            ``env`` (:class:`opfuse.Environment`) has the device and dtype of the module's
            parameters.
        name: The name in reports; default: the name of ``build``.
        priority: Converters of higher priority are asked first; default 0. The readers of
            opfuse-convert have -100.

    Raises:
        TypeError: An argument of the wrong type.
    """

    target: type | str | Callable[[nn.Module], bool]
    build: Callable[[nn.Module, Any], Conversion | str]
    name: str = ""
    priority: int = 0

    def __post_init__(self) -> None:
        if not (isinstance(self.target, str) or callable(self.target)):
            raise TypeError(
                f"Converter expected a class, its dotted name or a function, got {self.target!r}"
            )
        if not callable(self.build):
            raise TypeError(f"Converter expected a function as build, got {self.build!r}")
        if not isinstance(self.priority, int):
            raise TypeError(f"Converter expected an int as priority, got {self.priority!r}")
        if not self.name:
            name = getattr(self.build, "__name__", type(self.build).__name__)
            object.__setattr__(self, "name", name)

    def fits(self, module: nn.Module, cls: type) -> bool:
        """Whether it is for a module.

        Args:
            module: The module.
            cls: Its class as its author wrote it.
        """
        if isinstance(self.target, str):
            return f"{cls.__module__}.{cls.__qualname__}" == self.target
        if isinstance(self.target, type):
            return cls is self.target
        return bool(self.target(module))
