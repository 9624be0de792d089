"""The command line, and helpers for the commands of other packages.

A package adds a command by an entry point of group ``opfuse.commands``: a ``click.Command``.
"""

from .commands import main
from .models import UserError, load_model, quiet_stdout, user_errors

__all__ = ["UserError", "load_model", "main", "quiet_stdout", "user_errors"]
