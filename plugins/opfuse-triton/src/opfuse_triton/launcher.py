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
        size: The number of programs by the kernel's own grid, in three dimensions.
    """

    config: Config
    run: Callable[..., None]
    function: Any
    metadata: Any
    constants: tuple[Any, ...]
    compiled: Any
    size: tuple[int, ...] = ()


class _Form:
    """What to look at in arguments of these types, and the kernels that were launched for such.

    Attributes:
        tensors: The places of tensors; none if types are not known, for which the JIT launches.
        tuples: Those of tuples of numbers.
        integers: Those of integers.
        functions: Those of device functions among the constants, with the device before them.
        exact: What is launched for a configuration, a description and integers.
        alike: What is launched with what the integers are to Triton in their place.
    """

    def __init__(self, kinds: tuple[type, ...], constants: tuple[type, ...]) -> None:
        places = range(len(kinds) if _KNOWN.issuperset(kinds) else 0)
        self.tensors = [place for place in places if kinds[place] in _TENSORS]
        self.tuples = [place for place in places if kinds[place] is tuple]
        self.integers = [place for place in places if kinds[place] is int]
        # a device function is hashed by its source; what it wraps is one of a kind, too
        self.functions = [i for i, kind in enumerate(constants, 1) if kind is triton.JITFunction]
        self.exact: dict[Key, Ready] = {}
        self.alike: dict[Key, Ready] = {}


class Launcher:
    """The tables of one kernel, and how it is launched.

    Anything that is not in a key is ignored: if a global of the kernel changes after the first
    launch, that has no effect, where the JIT would raise an error.

    Args:
        fn: The function under ``@triton.jit``.
        grid: The grid of launches that give none, from the integers among the arguments, in their
            order, and the configuration. It is asked once for these.
    """

    def __init__(self, fn: Any, grid: Callable[..., tuple[int, ...]] | None = None) -> None:
        self.fn, self.grid = fn, grid
        self._forms: dict[Key, _Form] = {}

    def launch(
        self,
        grid: Grid | None,
        *args: Any,
        config: Config | Mapping[str, Any] | None = None,
        **constants: Any,
    ) -> None:
        """Launch the kernel on the device of its tensors, on the current stream.

        Args:
            grid: Number of programs, in one to three dimensions, or a function of the configuration
                that returns it; None: the kernel's own.
            *args: Tensors and numbers, in the order of the kernel's parameters.
            config: The configuration, or one of :meth:`Kernel.candidates`; None:
                :meth:`Kernel.pick`.
            **constants: ``tl.constexpr`` arguments that the configuration does not have.
        """
        if config is not None and not isinstance(config, Config):
            config = Config(**config)
        values, key = constants.values(), None
        kinds = (*map(type, args), *map(type, values), *constants)
        if (form := self._forms.get(kinds)) is None:
            form = self._forms[kinds] = _Form(tuple(map(type, args)), tuple(map(type, values)))
        try:
            device = args[form.tensors[0]].get_device()
            found = [device, *values]
            for place in form.functions:
                found[place] = found[place].fn
            for place in form.tuples:
                if not _FLOAT.issuperset(map(type, args[place])):
                    raise TypeError("only floats")
                found.append(len(args[place]))
            for place in form.tensors:
                tensor = args[place]
                found += tensor.dtype, tensor.data_ptr() % 16 == 0
                if _HIP:
                    found.append(tensor.untyped_storage().size() <= _LARGEST_RANGE)
            key = config, tuple(found), tuple(map(args.__getitem__, form.integers))
            ready = form.exact[key]
            watched = any(_watching(knobs)) or self.fn.pre_run_hooks or pretended.get()
        # new arguments; types that are not known; a constant without a hash
        except (LookupError, TypeError, AttributeError):
            watched = True
        # under a simulated target, and so while launches are recorded, nothing is known
        if watched:
            return self._launch(grid, args, config, constants, form, key)
        chosen, run, function, metadata, behind, _, size = ready
        if grid is not None:
            size = ((*grid(chosen), 1, 1) if callable(grid) else (*grid, 1, 1))[:3]
        active = driver.active
        stream = active.get_current_stream(device)
        # neither hooks nor metadata for them: with hooks, the JIT launches
        if active.get_current_device() == device:
            run(*size, stream, function, metadata, None, None, None, *args, *behind)
        else:
            with torch.cuda.device(device):
                run(*size, stream, function, metadata, None, None, None, *args, *behind)

    def _launch(self, grid: Any, args: Any, config: Any, constants: Any, *known: Any) -> None:
        """Launch for arguments of which nothing is known, or while somebody watches.

        ``known`` is the form of their types, and their key or None.
        """
        raise NotImplementedError

    def size(self, grid: Grid | None, args: Iterable[Any], config: Config) -> tuple[int, ...]:
        """The number of programs of a launch.

        Args:
            grid: As for :meth:`launch`.
            args: The arguments before the constants.
            config: The configuration.
        """
        if grid is None and self.grid is not None:
            return self.grid(*[arg for arg in args if type(arg) is int], config)
        return grid(config) if callable(grid) else grid  # type: ignore[return-value]

    def _is_watched(self) -> bool:
        """Return whether hooks or settings forbid what :meth:`launch` does; see there."""
        try:
            return bool(any(_watching(knobs)) or self.fn.pre_run_hooks or pretended.get())
        except AttributeError:  # a function in place of Triton's chain of hooks
            return True

    def knows_alike(self, form: _Form, key: Key | None, picked: Config) -> bool:
        """Return whether :meth:`launch` now knows these arguments, by what they are to Triton.

        Args:
            form: That of their types.
            key: Theirs; None: they have none.
            picked: The configuration.
        """
        if key is None:
            return False
        try:
            ready = form.alike[(picked, key[1], *map(_to_triton, key[2]))]
        except (KeyError, TypeError):
            return False
        self._remember(form, key, ready)
        return not self._is_watched()

    def keep(
        self,
        count: int,
        constants: Mapping[str, Any],
        form: _Form,
        key: Key | None,
        picked: Config,
        compiled: Any,
    ) -> None:
        """Remember what the JIT launched.

        Args:
            count: The number of arguments before the constants.
            constants: The constants that the caller gave.
            form: See :meth:`knows_alike`.
            key: See there.
            picked: The configuration.
            compiled: What the JIT gave.
        """
        behind = self.fn.params[count:]
        compiled_now = isinstance(compiled, triton.compiler.CompiledKernel)
        usual = _TESTED and compiled_now and not self._is_watched()
        if key is None or not (usual and all(param.is_constexpr for param in behind)):
            return
        given = {**constants, **picked.constants}
        values = tuple([given.get(param.name, param.default) for param in behind])
        how = compiled.run, compiled.function, compiled.packed_metadata
        with contextlib.suppress(TypeError):  # as in launch
            self._remember(form, key, Ready(picked, *how, values, compiled), new=True)

    def _remember(self, form: _Form, key: Key, ready: Ready, new: bool = False) -> None:
        _, described, integers = key
        size = (*self.grid(*integers, ready.config), 1, 1)[:3] if self.grid else ()
        tables = [(form.exact, key, ready._replace(size=size))]
        if new:
            alike = ready.config, described, *map(_to_triton, integers)
            tables.append((form.alike, alike, ready))
        for table, place, found in tables:
            if len(table) >= MOST_KEYS:
                table.clear()
            table[place] = found


def on_device(index: int) -> contextlib.AbstractContextManager[None]:
    """Make a GPU the current one: Triton launches on no other."""
    here = driver.active.get_current_device() == index
    return contextlib.nullcontext() if here else torch.cuda.device(index)


def _to_triton(number: int) -> tuple[Any, ...]:
    """Return what Triton distinguishes of an integer: 1, multiples of 16, and its type."""
    return number == 1, number % 16 == 0, -(2**31) <= number < 2**31, number >= 2**63
