"""The activations of opfuse.ops by kind, so that a new one is in every table."""

import inspect

from opfuse import ops


def _of(*kinds):
    made = [getattr(ops, name) for name in ops.__all__]
    made.remove(ops.ScaledActivation)  # it wraps one that is given
    return [cls for cls in made if issubclass(cls, kinds) and not inspect.isabstract(cls)]


SCALED = _of(ops.ScaledActivation)
GATED = [cls for cls in _of(ops.GatedActivation) if cls not in SCALED]
ELEMENTWISE = [cls for cls in _of(ops.Activation) if cls not in (*GATED, *SCALED)]


def check_table(names, where):
    """Asserts that the table ``where`` has a row for each activation, and says which rows to add."""
    missing = {cls.__name__ for cls in (*ELEMENTWISE, *GATED)} - set(names)
    assert not missing, f"add a row for {', '.join(sorted(missing))} to {where}"
