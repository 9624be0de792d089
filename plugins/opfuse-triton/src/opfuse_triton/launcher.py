"""The fast way to launch: it remembers what Triton's JIT found for the same arguments.

At every launch ``JITFunction.run`` describes each argument and formats all options into a string. A
:class:`Launcher` lets it do so once for each key, takes the compiled kernel that it gives, and
launches that from then on. A key has all that the JIT's answer follows from: the types of the
arguments, the configuration, the constants, the dtypes of the tensors, whether their addresses are
multiples of 16 bytes, the integers, and the device. For integers that are new there is a second
table, whose keys have what they are to Triton in their place: 1, a multiple of 16, or another.

It is here since Triton's launcher alone makes a training step of a converted Llama block take 1.15
to 1.23 times the CPU time on an AMD EPYC (bf16 of 8192 x 4096, `python -m benchmarks.ledger host`).
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs
from triton.runtime.driver import driver

from .configs import Config
from .targets import pretended

MOST_KEYS = 1024
"""Keys that are remembered for arguments of the same types. One more: all are forgotten."""

Key = tuple[Any, ...]
Grid = tuple[int, ...] | Callable[[Config], tuple[int, ...]]
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_KNOWN = _TENSORS | {int, float, tuple, type(None)}
_FLOAT = frozenset({float})
_HIP = torch.version.hip is not None
_TESTED = triton.__version__.startswith(("3.6.", "3.7.", "3.8.", "3.9."))
"""What is used of Triton here is private to it: other versions launch by themselves."""
_watching = operator.attrgetter(
    *[f"runtime.launch_{which}_hook.calls" for which in ("enter", "exit")],
    *("runtime.debug", "runtime.add_stages_inspection_hook", "compilation.instrumentation_mode"),
)
"""Gives the hooks that watch Triton launch, and the settings that change how it compiles."""
_LARGEST_RANGE = 2**31 - 1
"""On HIP Triton addresses a tensor of at most so many bytes by 32 bits."""


class Ready(NamedTuple):
    """The compiled kernel of a key, with all that a launch needs.

    Attributes:
        config: The configuration.
        run: Triton's launcher.
        function: The handle of the loaded kernel.
        metadata: What the launcher needs to know about it.
        constants: The values of the parameters after the arguments.
        compiled: The compiled kernel, which is unloaded when nothing refers to it.
    """

    config: Config
    run: Callable[..., None]
    function: Any
    metadata: Any
    constants: tuple[Any, ...]
    compiled: Any


class _Form:
    """Describes arguments of these types, and holds the kernels that were launched for such.

    Attributes:
        exact: What is launched for a configuration, a description and integers.
        alike: What is launched with what the integers are to Triton in their place.
    """

    def __init__(self, kinds: tuple[type, ...], constants: tuple[type, ...]) -> None:
        places = range(len(kinds))
        self._tensors = [place for place in places if kinds[place] in _TENSORS]
        self._tuples = [place for place in places if kinds[place] is tuple]
        self._integers = [place for place in places if kinds[place] is int]
        # a device function is hashed by its source; what it wraps is one of a kind, too
        self._functions = [i for i, kind in enumerate(constants, 1) if kind is triton.JITFunction]
        self.exact: dict[Key, Ready] = {}
        self.alike: dict[Key, Ready] = {}

    def describe(self, args: tuple[Any, ...], constants: Iterable[Any]) -> tuple[Key, Key]:
        """All but the integers, with the device first, and the integers.

        Raises:
            TypeError: A tuple has others than floats.
        """
        found = [args[self._tensors[0]].get_device(), *constants]
        for place in self._functions:
            found[place] = found[place].fn
        for place in self._tuples:
            numbers = args[place]
            if not _FLOAT.issuperset(map(type, numbers)):
                raise TypeError("only floats")
            found.append(len(numbers))
        for place in self._tensors:
            tensor = args[place]
            found += tensor.dtype, tensor.data_ptr() % 16 == 0
            if _HIP:
                found.append(tensor.untyped_storage().size() <= _LARGEST_RANGE)
        return tuple(found), tuple(map(args.__getitem__, self._integers))


class Launcher:
    """The tables of one kernel, and how it is launched.

    Anything that is not in a key is ignored: if a global of the kernel changes after the first
    launch, that has no effect, where the JIT would raise an error.

    Args:
        fn: The function under ``@triton.jit``.
    """

    def __init__(self, fn: Any) -> None:
        self.fn = fn
        self._forms: dict[Key, _Form] = {}

    def launch(
        self,
        grid: Grid,
        *args: Any,
        config: Config | Mapping[str, Any] | None = None,
        **constants: Any,
    ) -> None:
        """Launch the kernel on the device of its tensors, on the current stream.

        Args:
            grid: Number of programs, in one to three dimensions, or a function of the configuration
                that returns it.
            *args: Tensors and numbers, in the order of the kernel's parameters.
            config: The configuration, or one of :meth:`Kernel.candidates`; None:
                :meth:`Kernel.pick`.
            **constants: ``tl.constexpr`` arguments that the configuration does not have.
        """
        if config is not None and not isinstance(config, Config):
            config = Config(**config)
        values = constants.values()
        try:
            form = self._forms[(*map(type, args), *map(type, values), *constants)]
            described, integers = form.describe(args, values)
            ready = form.exact[config, described, integers]
            watched = any(_watching(knobs)) or self.fn.pre_run_hooks or pretended.get()
        # new arguments; a constant without a hash, or a tuple of others than floats
        except (KeyError, TypeError, AttributeError):
            watched = True
        # under a simulated target, and so while launches are recorded, nothing is known
        if watched:
            return self._launch(grid, args, config, constants)
        chosen, run, function, metadata, behind, _ = ready
        x, y, z = ((*grid(chosen), 1, 1) if callable(grid) else (*grid, 1, 1))[:3]
        active, device = driver.active, described[0]
        stream = active.get_current_stream(device)
        # neither hooks nor metadata for them: with hooks, the JIT launches
        if active.get_current_device() == device:
            run(x, y, z, stream, function, metadata, None, None, None, *args, *behind)
        else:
            with torch.cuda.device(device):
                run(x, y, z, stream, function, metadata, None, None, None, *args, *behind)

    def _launch(
        self, grid: Grid, args: tuple[Any, ...], config: Config | None, constants: Mapping[str, Any]
    ) -> None:
        """Launch for arguments of which nothing is known, or while somebody watches."""
        raise NotImplementedError

    def _is_watched(self) -> bool:
        """Return whether hooks or settings forbid what :meth:`launch` does; see there."""
        try:
            return bool(any(_watching(knobs)) or self.fn.pre_run_hooks or pretended.get())
        except AttributeError:  # a function in place of Triton's chain of hooks
            return True

    def knows_alike(
        self,
        args: tuple[Any, ...],
        config: Config | None,
        constants: Mapping[str, Any],
        picked: Config,
    ) -> bool:
        """Return whether :meth:`launch` now knows these arguments, by what they are to Triton.

        Args:
            args: The arguments before the constants.
            config: The configuration that the caller gave.
            constants: The other constants.
            picked: The configuration.
        """
        values = constants.values()
        try:
            form = self._forms[(*map(type, args), *map(type, values), *constants)]
            described, integers = form.describe(args, values)
            ready = form.alike[(picked, described, *map(_to_triton, integers))]
        except (KeyError, TypeError):
            return False
        _remember(form.exact, (config, described, integers), ready)
        return not self._is_watched()

    def keep(
        self,
        args: tuple[Any, ...],
        config: Config | None,
        constants: Mapping[str, Any],
        picked: Config,
        compiled: Any,
    ) -> None:
        """Remember what the JIT launched.

        Args:
            args: The arguments before the constants.
            config: The configuration that the caller gave.
            constants: The other constants.
            picked: The configuration.
            compiled: What the JIT gave.
        """
        behind = self.fn.params[len(args) :]
        usual = _TESTED and not self._is_watched()
        compiled_now = isinstance(compiled, triton.compiler.CompiledKernel)
        own = tuple(map(type, args))
        known = _KNOWN.issuperset(own) and not _TENSORS.isdisjoint(own)
        if not (usual and compiled_now and known and all(param.is_constexpr for param in behind)):
            return
        of_constants = tuple(map(type, constants.values()))
        kinds = *own, *of_constants, *constants
        form = self._forms.setdefault(kinds, _Form(own, of_constants))
        given = {**constants, **picked.constants}
        values = tuple([given.get(param.name, param.default) for param in behind])
        how = compiled.run, compiled.function, compiled.packed_metadata
        ready = Ready(picked, *how, values, compiled)
        with contextlib.suppress(TypeError):  # as in launch
            described, integers = form.describe(args, constants.values())
            _remember(form.exact, (config, described, integers), ready)
            _remember(form.alike, (picked, described, *map(_to_triton, integers)), ready)


def on_device(index: int) -> contextlib.AbstractContextManager[None]:
    """Make a GPU the current one: Triton launches on no other."""
    here = driver.active.get_current_device() == index
    return contextlib.nullcontext() if here else torch.cuda.device(index)


def _to_triton(number: int) -> tuple[Any, ...]:
    """Return what Triton distinguishes of an integer: 1, multiples of 16, and its type."""
    return number == 1, number % 16 == 0, -(2**31) <= number < 2**31, number >= 2**63


def _remember(table: dict[Key, Ready], key: Key, ready: Ready) -> None:
    if len(table) >= MOST_KEYS:
        table.clear()
    table[key] = ready
