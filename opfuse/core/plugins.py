"""The plugins of this process: which are selected, what there is, and fusions added in code."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from .fusion import Fusion, FusionLike, fusion_name
from .plugin_manager import PluginManager as PluginManager
from .plugin_manager import Registration
from .records import PluginFilter
from .settings import Setting, current


class using(Setting):
    """Select plugins for a ``with`` block, in this thread.

    Args:
        selection: As in ``OPFUSE_PLUGINS``: ``"a,b"`` selects these in this precedence, ``"-a"``
            all but a, ``""`` none, None all.

    Raises:
        ValueError: The two forms are mixed.
    """

    def __init__(self, selection: str | None) -> None:
        PluginFilter.parse(selection)
        super().__init__(selection=selection)


manager = PluginManager()
"""The plugins of this process."""

recipes = manager.recipes
register = manager.register
remove = manager.remove


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Hide all plugins and fusions registered in code for a ``with`` block, for tests.

    Registrations made inside the block end with it. Other threads are isolated too.
    """
    tools = manager.tools
    with manager.temporarily(records=[], tools=tools, _registered=[]), using(None):
        try:
            yield
        finally:
            added = [tool for tool in manager.tools if tool not in tools]
            for record in [*manager.records, *added]:
                manager.remove(record)


def listing(*, tools: bool = False) -> list[dict[str, Any]]:
    """Every plugin with its state, after the selected ones are loaded, as JSON-able data.

    ``fusions`` maps the names of a plugin's fusions to their passes, ``priorities`` to
    those that are not 0, by pass.

    Args:
        tools: Whether to list the tools instead.
    """
    (manager.active_tools if tools else manager.active)(current.selection)
    selection = PluginFilter.parse(current.selection)
    rows = []
    for record in manager.tools if tools else manager.records:
        blocked = selection.position(record) is None and record.state in ("found", "loaded")
        fusions: dict[str, list[str]] = {}
        priorities: dict[str, dict[str, int]] = {}
        for passes, fusion in record.fusions:
            fusions.setdefault(fusion_name(fusion), []).append(passes)
            if isinstance(fusion, Fusion) and fusion.priority:
                priorities.setdefault(fusion.name, {})[passes] = fusion.priority
        row = {key: getattr(record, key) for key in ("name", "distribution", "version")}
        row |= {"state": "blocked" if blocked else record.state, "hooks": list(record.hooks)}
        of = {"fusions": fusions, "priorities": priorities}
        rows.append(row | of | {"error": record.error})
    return rows


def register_forward_fusion(fusion: FusionLike, prepend: bool = False) -> Registration:
    """Add a forward fusion in code.

    Args:
        fusion: A :class:`Fusion`, or a function ``func(ops, *, recipe) -> ops`` that replaces some
            of the given basic ops by fused ops.
        prepend: Whether it chooses before all fusions except those of plugins that the user listed.

    Returns:
        A handle with ``unregister()``.
    """
    return manager.register_fusion("forward", fusion, prepend)


def register_backward_fusion(fusion: FusionLike, prepend: bool = False) -> Registration:
    """Add a backward fusion in code; see :func:`register_forward_fusion`."""
    return manager.register_fusion("backward", fusion, prepend)


def register_forward_backward_fusion(fusion: FusionLike, prepend: bool = False) -> Registration:
    """Add a joint fusion of both passes in code; see :func:`register_forward_fusion`."""
    return manager.register_fusion("joint", fusion, prepend)
