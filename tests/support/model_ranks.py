"""What one process does with models in DDP and FSDP2. In a module of its own, so that the other process can import it."""

from __future__ import annotations

import copy
import sys
import warnings

import families
import torch
from steps import plain_name

import opfuse
from opfuse.core.introspection import op_class
from opfuse.report.calls import saved_bytes

ORDERS = {
    "ddp": ("ddp, convert", "convert, ddp"),
    "fsdp": ("convert, fsdp", "convert, checkpointing, fsdp", "convert, fsdp sharded again"),
    "plan": ("plan, ddp", "convert, plan, fsdp", "fsdp, plan", "fsdp, convert, plan"),
    "fsdp first": ("fsdp, convert", "fsdp, report", "fsdp, convert, checkpointing"),
}


def worker(rank, names, orders, least):
    """Train every model in every order; ``least``: whether something must be converted in each."""
    failed = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            for order in orders:
                try:
                    train(rank, families.FAMILIES[name], order.split(", "), least)
                except Exception as error:
                    failed.append(f"{name}, {order}: {type(error).__name__}: {str(error)[:300]}")
    if failed:
        print("\n".join(failed), file=sys.stderr)
        raise AssertionError("; ".join(failed))


def wrap(model, family, how):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    if how == "ddp":
        return DistributedDataParallel(model)
    if how.startswith("fsdp"):
        mesh = init_device_mesh("cpu", (2,))
        cls = op_class(family.layers(model)[0])
        for layer in [m for m in model.modules() if isinstance(m, cls)]:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh, reshard_after_forward=how != "fsdp" or None)
    if how == "checkpointing":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if how == "convert":
        opfuse.convert(model)
    if how == "plan":  # made for the whole model, and attached to what each process has of it
        attach_plan(model, family)
    if how == "report":
        opfuse.convert(model, half(family, 0))
    return model


def attach_plan(model, family):
    whole, given = family.make(), half(family, 0)
    for each in (whole, model):
        if hasattr(each, "config"):
            each.config.use_cache = False
    if opfuse.converted(model):
        opfuse.convert(whole)
    plan = opfuse.plan_memory(whole, budget=0.5, measure=False, **given)
    assert any("recompute" in choice.option for choice in plan.choices)
    kept = []
    for attach in (plan.detach, plan.attach):  # both have what is gathered of the parameters, too
        attach(model)
        kept.append(saved_bytes(lambda: model(**given), model.parameters()))
    model(**given).loss.backward()  # FSDP2 shards again
    assert kept[0] - kept[1] >= 0.95 * (plan.before - plan.kept), f"{kept}: {plan}"


def half(family, rank):
    """The rows of one process; both have as many, so that the mean of losses is that of all."""
    return {key: value[rank * 2 : rank * 2 + 2] for key, value in family.inputs(rows=4).items()}


def train(rank, family, order, least):
    reference = family.make()
    model = copy.deepcopy(reference)
    logits = []
    for part in (0, 1):
        out = reference(**half(family, part))
        logits.append(out.logits)
        (out.loss / 2).backward()
    wrapped = model
    for how in order:
        wrapped = wrap(wrapped, family, how)
    assert opfuse.converted(wrapped) or not least, "nothing is converted"
    if any(how.startswith("fsdp") for how in order):
        assert all(hasattr(param, "full_tensor") for param in wrapped.parameters()), "gathered"
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-3)
    for read in (True, False):
        optimizer.zero_grad()
        out = wrapped(**half(family, rank))
        if read:
            try:
                found = out.logits
            except RuntimeError as error:  # its loss needed none, and the head is in parts again
                assert "fsdp sharded again" in order and "sharded its head again since" in str(
                    error
                )
            else:
                torch.testing.assert_close(found, logits[rank], rtol=1e-4, atol=1e-4)
        out.loss.backward()
    expected = {name: param.grad for name, param in reference.named_parameters()}
    there = max(grad.norm() for grad in expected.values() if grad is not None)
    for name, param in wrapped.named_parameters():
        grad = param.grad
        grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        theirs = expected[plain_name(name)]
        if theirs is None:
            assert grad is None or not grad.any(), name
            continue
        size = there if name.endswith(family.zero or ("\n",)) else theirs.norm()
        assert (grad - theirs).norm() <= 1e-5 * size, f"{name}: {(grad - theirs).norm() / size}"
    optimizer.step()
    if "fsdp" in order:
        whys = set(opfuse.converted(wrapped).values())
        attention = ("under a recipe alone", "no plugin fuses its rotations")
        assert all(not why or why.endswith(attention) for why in whys), whys
        opfuse.revert(wrapped)
        assert not opfuse.converted(wrapped)
        for layer in family.layers(wrapped):
            assert type(layer).__name__.startswith("FSDP")
        wrapped(**half(family, rank)).loss.backward()
