"""Shared by the commands: loading the user's model, and code that prints or raises."""

from __future__ import annotations

import contextlib
import os
import pkgutil
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import click
from torch import nn

from ..core.errors import PluginWarning


class UserError(click.ClickException):
    """A mistake in what was asked for: one line on stderr."""

    exit_code = 2


@contextlib.contextmanager
def quiet_stdout() -> Iterator[None]:
    """Keep stdout for the answer.

    Foreign code prints to stderr, where plugin warnings take one line.
    """
    show = warnings.showwarning

    def one_line(message: Any, category: type[Warning], *where: Any, **more: Any) -> None:
        if issubclass(category, PluginWarning):
            click.echo("Warning: " + " ".join(str(message).split()), err=True)
        else:
            show(message, category, *where, **more)

    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("always", PluginWarning)
        warnings.showwarning = one_line
        yield


@contextlib.contextmanager
def user_errors(what: str) -> Iterator[None]:
    """Turn an error of foreign code into one line that begins with ``what``."""
    try:
        yield
    except Exception as error:
        raise UserError(" ".join(f"{what} {type(error).__name__}: {error}".split())) from error


def load_model(target: str) -> tuple[Any, list[Any], dict[str, Any]]:
    """The model that ``MODULE:OBJECT`` means, and its inputs by place and by name."""
    name, colon, path = target.partition(":")
    if not (name and colon and path):
        raise UserError(f"expected MODULE:OBJECT, got {target!r}")
    sys.path.insert(0, os.getcwd())
    with user_errors(f"cannot load {target!r}:"):
        value: Any = pkgutil.resolve_name(target)
    if callable(value) and not isinstance(value, nn.Module):
        with user_errors(f"{target}() raised"):
            value = value()
    parts = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if not parts or not callable(parts[0]) or isinstance(parts[0], type):
        got = ", ".join(type(part).__name__ for part in parts)
        raise UserError(f"{target} must give (model, input, ...), got ({got})")
    model, *inputs = parts
    by_name = inputs.pop() if inputs and isinstance(inputs[-1], dict) else {}
    return model, inputs, by_name
