"""Recording: the launches of a plugin are kept, and nothing runs."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.compiler import ASTSource, make_backend
from triton.runtime import jit

from .configs import Config
from .machine import recorded
from .targets import Target, target

asked: ContextVar[list[tuple[Any, Mapping[str, Any]]] | None] = ContextVar(
    "opfuse_asked", default=None
)
"""Kernels that were asked for a configuration, with the facts; None: nobody wants to know."""


@contextlib.contextmanager
def recording(chosen: Target | int | str) -> Iterator[list[Launch]]:
    """Within the context, no kernel is launched: each launch is appended to the list.

    The tensors may be on the meta device. They then have real shapes, dtypes and strides, and no
    memory. Their addresses are taken for multiples of 16 bytes, plus their storage offset.

    Args:
        chosen: The target that configurations are picked for, or its key in
            :data:`opfuse_triton.TARGETS`.
    """
    launches: list[Launch] = []
    with target(chosen):
        token = recorded.set(launches)
        try:
            yield launches
        finally:
            recorded.reset(token)


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel, as it was asked for.

    Attributes:
        kernel: The :class:`Kernel`.
        args: Its tensors and numbers, in the order of its parameters.
        constants: The ``tl.constexpr`` arguments that the caller gave, by name.
        config: The configuration, with the other constants.
        grid: Number of programs, in one to three dimensions.
        target: What the configuration was picked for.
    """

    kernel: Any
    args: tuple[Any, ...]
    constants: Mapping[str, Any]
    config: Config
    grid: tuple[int, ...]
    target: Target

    @property
    def arguments(self) -> dict[str, Any]:
        """All arguments of the kernel by the names of its parameters."""
        by_name = dict(zip(self.kernel.fn.arg_names, self.args, strict=False))
        return {**by_name, **self.constants, **self.config.constants}

    @property
    def facts(self) -> dict[str, Any]:
        """Facts that a configuration may depend on, by the names of parameters.

        The dtypes of tensors, integers, None for what is absent, and the constants.
        """
        return facts_of(self.kernel.fn.arg_names, self.args, self.constants)

    @property
    def key(self) -> str:
        """What the compiled code follows from, but for Triton and the target."""
        given = [kind_of(value) for value in self.args]
        constants = {name: _constant(value) for name, value in self.constants.items()}
        return f"{code_of(self.kernel.fn)} {given} {constants} {self.config.to_dict()}"

    def compile(self, other: Target | None = None) -> Any:
        """Compile what the launch would compile, with no GPU.

        The signature, the constants and what is assumed of addresses and numbers are those that
        Triton finds at a launch. The configuration stays.

        Args:
            other: A target to compile for instead of :attr:`target`.

        Returns:
            Triton's ``CompiledKernel``: ``asm`` and ``metadata`` are of use without a GPU.

        Raises:
            RuntimeError: Triton interprets in this process.
        """
        fn = self.kernel.fn
        if not isinstance(fn, triton.JITFunction):
            raise RuntimeError("TRITON_INTERPRET is set, so that nothing can be compiled: unset it")
        gpu = (other or self.target).for_triton()
        backend = make_backend(gpu)
        bind = jit.create_function_from_signature(fn.signature, fn.params, backend)
        keywords = {"debug": False, **self.constants, **self.config.constants}
        keywords |= self.config.compiler_options()
        bound, specialization, rest = bind(*self.args, **keywords)
        options, signature, constants, attributes = fn._pack_args(
            backend, keywords, bound, specialization, rest
        )
        source = ASTSource(fn, signature, constants, attributes)
        return triton.compile(source, target=gpu, options=options.__dict__)


def kind_of(value: Any) -> Any:
    """What Triton knows of an argument while it compiles.

    Args:
        value: The argument.
    """
    if isinstance(value, torch.Tensor):
        return value.dtype, value.storage_offset() * value.dtype.itemsize % 16
    if isinstance(value, int) and not isinstance(value, bool):
        return "int", value if value < 2 else value % 16, value.bit_length() > 31
    base = getattr(value, "base", None)
    return type(value).__name__ if base is None else (kind_of(base), value.block_shape)


def _constant(value: Any) -> Any:
    """A constant, or a tuple of them; of a function its code."""
    if isinstance(value, tuple):
        return tuple(map(_constant, value))
    return code_of(value) if hasattr(value, "arg_names") else value


@functools.cache
def code_of(function: Any) -> str:
    """The source of a jitted function, and of the functions and constants that it names.

    Args:
        function: The function, compiled or interpreted.
    """
    plain = function.fn
    found, code = [inspect.getsource(plain)], plain.__code__
    known = {**plain.__globals__, **inspect.getclosurevars(plain).nonlocals}
    names = code.co_names + code.co_freevars
    spaces = [vars(one) for one in map(known.get, names) if isinstance(one, types.ModuleType)]
    for name in names:
        for one in [space[name] for space in (known, *spaces) if name in space]:
            ours = not getattr(one, "__module__", "triton").startswith("triton")
            if ours and hasattr(one, "arg_names") and one is not function:
                found.append(code_of(one))
            elif isinstance(one, (triton.language.constexpr, int, float)):
                found.append(f"{name} = {one}")
    return "\n".join(found)


def facts_of(
    names: list[str], args: tuple[Any, ...], constants: Mapping[str, Any]
) -> dict[str, Any]:
    """See :attr:`Launch.facts`."""
    given = [value.dtype if isinstance(value, torch.Tensor) else value for value in args]
    facts = dict(zip(names, given, strict=False))
    wanted = torch.dtype, int, type(None)
    return {**constants, **{name: v for name, v in facts.items() if isinstance(v, wanted)}}
