"""Kernels: one Triton function, with what it is compiled with and how it is launched."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import triton

from . import config_tables
from .configs import Config
from .launcher import Launcher, on_device
from .launches import Launch, asked, facts_of
from .machine import recorded
from .targets import Target, current_target

MOST_CANDIDATES = 8
"""Configurations of one kernel that are worth measuring: each is compiled first."""

Configs = Sequence[Config] | Callable[[Target, Mapping[str, Any]], Sequence[Config]]


class Kernel(Launcher):
    """A kernel that can be launched, recorded and tuned.

    Everything that a plugin launches goes through one: then the checks see every launch.

    Args:
        fn: A function under ``@triton.jit``. Its tensors and numbers come first, its
            ``tl.constexpr`` parameters last.
        configs: At most 8 configurations, the first of which is used; or a function of the target
            and of the facts (:attr:`Launch.facts`) that gives them, the best first. Such a
            function looks in a small table, and has a rule for everything else.
        grid: The grid of launches that give none: a function of the integers among the arguments,
            in their order, and of the configuration. A launch that is known does not ask it again.

    Raises:
        ValueError: ``fn`` has a parameter named ``grid`` or ``config``.
    """

    def __init__(
        self, fn: Any, configs: Configs, grid: Callable[..., tuple[int, ...]] | None = None
    ) -> None:
        if taken := {"grid", "config"} & set(fn.arg_names):
            raise ValueError(
                f"{fn.__name__} has a parameter {taken.pop()!r}, which means something else in "
                "Kernel.launch: rename it"
            )
        super().__init__(fn, grid)
        self.name: str = fn.__name__
        self.full_name = f"{fn.fn.__module__}.{self.name}"
        self._configs = configs
        self._interpreted = not isinstance(fn, triton.JITFunction)

    def __repr__(self) -> str:
        return f"Kernel({self.name})"

    def pick(self, target: Target, facts: Mapping[str, Any]) -> Config:
        """The configuration for a launch that gives none.

        It is what was measured on this GPU, if there is a table of that; else the first one.

        Args:
            target: What is compiled for.
            facts: See :attr:`Launch.facts`.

        Raises:
            ValueError: There is none, or there are more than 8.
        """
        if (questions := asked.get()) is not None:
            questions.append((self, facts))
        possible = self.possible(target, facts)
        return config_tables.chosen(target.name, self.full_name, facts, possible)

    def candidates(self, target: Target, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The possible values of ``config`` in :meth:`launch`, the best guess first, for JSON.

        Args:
            target: What is compiled for.
            facts: See :attr:`Launch.facts`.

        Raises:
            ValueError: There is none, or there are more than 8.
        """
        return [config.to_dict() for config in self.possible(target, facts)]

    def possible(self, target: Target, facts: Mapping[str, Any]) -> Sequence[Config]:
        """The same as they are, see :meth:`candidates`."""
        given = self._configs
        found = given(target, facts) if callable(given) else given
        if not 0 < len(found) <= MOST_CANDIDATES:
            raise ValueError(
                f"{self.name} has {len(found)} configurations, and 1 to {MOST_CANDIDATES} are "
                f"possible: {target}, {dict(facts)}"
            )
        return found

    @contextlib.contextmanager
    def pinned(self, config: Config | Mapping[str, Any]) -> Iterator[None]:
        """Within the context, every launch of this kernel has that configuration, and picks it.

        Raises:
            RuntimeError: The kernel is pinned already.
        """
        if "launch" in vars(self):
            raise RuntimeError(f"{self.name} is pinned already: leave that context first")
        launch = self.launch
        chosen = config if isinstance(config, Config) else Config(**config)

        def launch_pinned(*args: Any, config: Any = None, **constants: Any) -> None:
            launch(*args, config=chosen, **constants)

        self.launch = launch_pinned  # type: ignore[method-assign]
        # who divides its work by a configuration asks for it first
        self.pick = lambda target, facts: chosen  # type: ignore[method-assign]
        try:
            yield
        finally:
            del self.launch, self.pick

    def _launch(self, grid: Any, args: Any, config: Any, constants: Any, *known: Any) -> None:
        """Launch a kernel for the first time, or while launches are recorded or interpreted."""
        form, key = known
        first = next(arg for arg in args if isinstance(arg, torch.Tensor))
        target = current_target(first.device)
        picked = config or self.pick(target, facts_of(self.fn.arg_names, args, constants))
        size = self.size(grid, args, picked)
        if (launches := recorded.get()) is not None:
            launches.append(Launch(self, args, constants, picked, size, target))
        elif self._interpreted:
            self.fn[size](*args, **constants, **picked.constants)
        elif self.knows_alike(form, key, picked):
            Launcher.launch(self, grid, *args, config=config, **constants)
        else:
            with on_device(first.get_device()):
                options = {**picked.constants, **picked.compiler_options()}
                compiled = self.fn[size](*args, **constants, **options)
            self.keep(len(args), constants, form, key, picked, compiled)
