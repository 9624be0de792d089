"""A warning of opfuse, and its error.

Other errors are the built-in ``ValueError``, ``TypeError`` and ``RuntimeError``: a caller should
not need to import opfuse to catch a wrong shape.
"""

from __future__ import annotations


class CallRefusedError(RuntimeError):
    """A tool refuses a call; its hooks, and what they return, may raise it.

    Every other error of a hook is a failure of the tool, see :class:`PluginWarning`.
    """


class PluginWarning(UserWarning):
    """A plugin could not be used; everything else works without it.

    The text names the distribution, its version, the reason and the switch that silences it. The
    same plugin stays visible as ``failed`` in ``opfuse plugins``.
    """
