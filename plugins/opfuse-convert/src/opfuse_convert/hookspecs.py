"""The hook of this package, which plugins implement beside those of opfuse."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opfuse.core.hookspecs import hookspec

if TYPE_CHECKING:
    from .converter import Converter


@hookspec
def opfuse_converters() -> list[Converter]:
    """Converters for ``opfuse.convert``, which replace the forwards of modules by chains.

    A plugin that is used without opfuse-convert, too, marks it ``optionalhook=True``, and imports
    this package inside of the function.

    A converter is needed only where ``opfuse.convert`` cannot read a module's ``forward``. Its
    ``build`` makes each op with ``Op.reading(child)``: the op uses the child's parameters, and the
    child keeps them. For parameters of the module itself, write ``reading(module, "name")`` and
    ``reads=[""]``. ``reads`` names every child whose parameters or results the chain uses.
    ``opfuse.convert(model, verify=True)`` compares the chain with the module, as does
    ``probed=True`` of a conversion. Otherwise the chain is used as it is, so test yours.

    Example::

        import opfuse
        from opfuse import ops


        def build(module, env):
            from opfuse_convert import Conversion

            first = ops.BasicLinear.reading(module.inner)
            chain = opfuse.Sequential(first, ops.GELU(approximate="none"))
            return Conversion(chain, reads=["inner"], call=call)


        def call(module, chain, x):  # takes what the module's own forward takes
            return chain(x)


        @opfuse.hookimpl(optionalhook=True)
        def opfuse_converters():
            from opfuse_convert import Converter

            return [Converter("mypackage.layers.Inner", build)]
    """
