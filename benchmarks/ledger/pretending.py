"""A GPU that is not there: plans are made for it, and run on tensors without memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from opfuse_triton import Target
from opfuse_triton import target as pretend
from torch.nn import functional as F

from opfuse.core.engine import planner
from opfuse.core.fusible import FusibleOperation
from opfuse.tuning import choosing, table, tool
from opfuse.tuning.table import Measurement, Table

CUDA = "13.0"
"""The version of CUDA that PyTorch counts as built with."""


@contextlib.contextmanager
def planned_for(target: Target, *, measured: bool = False) -> Iterator[None]:
    """Within the context, meta tensors count as tensors on a GPU.

    They keep their device, so that PyTorch makes others beside them. Plans, and code that asks for
    the GPU, are told the target. PyTorch's attention and norms are those of a GPU: one operation
    each, where they are many on the meta device.

    Args:
        target: An NVIDIA GPU.
        measured: Plan as if ``opfuse tune`` had found every fusion faster that does not trade time
            for memory, by as much as it declares.
    """
    major, minor = divmod(int(target.arch), 10)
    facts = {"major": major, "minor": minor, "multi_processor_count": target.multiprocessors}
    known = {
        "is_available": True,
        "current_device": 0,
        "get_device_capability": (major, minor),
        "get_device_properties": SimpleNamespace(**facts),
        "device": contextlib.nullcontext(),
    }
    patches = [mock.patch(f"torch.cuda.{name}", _giving(value)) for name, value in known.items()]
    for name, value in {"is_cuda": True, "is_meta": False}.items():
        patches.append(mock.patch.object(torch.Tensor, name, property(_giving(value))))
    for name in ("is_autocast_enabled", "get_autocast_dtype"):
        patches.append(mock.patch.object(torch, name, _on_cuda(getattr(torch, name))))
    environment, engine = planner._environment, FusibleOperation.engine

    def there(key: Any, input: Any) -> Any:
        return environment(key._replace(device=torch.device("cuda", 0)), input)

    def new_quantizer(recipe: Any, role: Any, env: Any, *others: Any) -> Any:
        """Its tensors are where the others are."""
        env = env._replace(device=torch.device("meta"))
        return engine.new_quantizer(recipe, role, env, *others)

    patches += [
        mock.patch.object(planner, "_environment", there),
        mock.patch.object(FusibleOperation, "engine", engine._replace(new_quantizer=new_quantizer)),
        mock.patch.object(planner, "device_name", _giving(str(target))),
        mock.patch.object(torch.version, "cuda", CUDA),
        mock.patch.object(F, "scaled_dot_product_attention", _attention),
        mock.patch.object(F, "rms_norm", lambda x, shape, *given: F.layer_norm(x, shape, given[0])),
    ]
    tables = Table({"": {}}) if measured else table.NO_TABLE
    patches.append(mock.patch.object(tool, "table_for", _giving(tables)))
    patches.append(mock.patch.object(choosing.Measurements, "look_up", _measurement))
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        stack.enter_context(pretend(target))
        table.reload()  # plans are made anew
        yield
    table.reload()


def _giving(value: Any) -> Callable[..., Any]:
    return lambda *unused: value


def _on_cuda(asked: Callable[[str], Any]) -> Callable[[str], Any]:
    """Autocast knows no meta device."""
    return lambda kind: asked("cuda" if kind == "meta" else kind)


def _attention(
    q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """FlashAttention, as on a GPU without a mask."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    return flash(q, k, v, dropout_p, is_causal or attn_mask is not None, scale=scale)[0]


def _measurement(known: Any, step: Any, read: Any) -> Measurement:
    """What tuning would have written, were a fusion as much faster as it declares."""
    fusion, facts = step.source.fusion, known.facts
    if "trades_time" in getattr(fusion, "declares", ()):
        return Measurement(0.9, 0.0, 0.0, 1)
    try:
        features = facts.chain.widths[step.start]
        env = facts.env._replace(measured=float("inf"), features=features)
        offered = fusion.build(step.matched).configurations(env)
        saved = fusion.benefit_of(step.matched, env)
    except Exception:  # one that cannot be built here is refused where it is asked
        offered, saved = [], 0
    return Measurement(1.5, 0.0, saved * 1e-6, 0, "", next(iter(offered), None))
