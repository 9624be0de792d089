"""Random chains with what they compute in plain torch, and fusions that cover any part of any chain."""

from __future__ import annotations

import contextlib
import copy
import random

import torch
from fakes import make_plugin, registered
from torch import nn
from torch.nn import functional as F

import opfuse
from opfuse import ops

# Fused ops that run their basic ops


class Forwarding(opfuse.FusedOperation):
    """Runs the basic ops one after the other, in either pass, whatever they are."""

    kwarg_names = None

    def __init__(self, basic_ops):
        super().__init__(basic_ops)
        self.grad_input = "same"
        for op in reversed(self.basic_ops):
            self.grad_input = self.grad_input if op.grad_input == "same" else op.grad_input

    def fuser_forward(self, basic_op_ctxs, input_, **given):
        return self.run_separately(basic_op_ctxs, input_, **given)

    def fuser_backward(self, basic_op_ctxs, grad_output, **given):
        return self.run_separately_backward(basic_op_ctxs, grad_output, **given)


class Backwarding(Forwarding):
    """The same under another name, so that plans tell the passes apart."""


class Joint(Forwarding):
    """Keeps what the basic ops left under one context, and their tensors under another, backwards."""

    def fuser_forward(self, basic_op_ctxs, input_, **given):
        inner = [copy.copy(ctx) for ctx in basic_op_ctxs]
        result = super().fuser_forward(inner, input_, **given)
        saved, kept = [], []
        for ctx in inner:
            kept.append((len(saved), ctx))
            saved += ctx.to_save or ()
            ctx.count, ctx.to_save, ctx.params = len(ctx.to_save or ()), None, ()
        basic_op_ctxs[0].kept = kept
        basic_op_ctxs[-1].save_for_backward(*saved[::-1])
        return result

    def fuser_backward(self, basic_op_ctxs, grad_output, **given):
        saved, inner = basic_op_ctxs[-1].saved_tensors[::-1], []
        for (start, ctx), own in zip(basic_op_ctxs[0].kept, basic_op_ctxs, strict=True):
            inner.append(copy.copy(ctx))
            inner[-1].is_reached = own.is_reached
            inner[-1].saved_tensors = saved[start : start + ctx.count]
        inner[-1].owns_grad_output = basic_op_ctxs[-1].owns_grad_output
        return super().fuser_backward(inner, grad_output, **given)


KINDS = {"forward": Forwarding, "backward": Backwarding, "joint": Joint}


def intervals(cls, seed, density=0.7):
    """Only a fusion function that replaces random intervals of whatever it gets."""

    def random_intervals(basic, *, recipe):
        rng, result, position = random.Random(f"{seed} {len(basic)}"), [], 0
        while position < len(basic):
            part = basic[position : position + rng.randint(1, 5)]
            result += [cls(part)] if rng.random() < density else part
            position += len(part)
        return result

    return [random_intervals]


def patterns(cls, seed):
    """Fusions that match any ops, and compete for them with random benefits."""
    any_op = opfuse.Subclasses(opfuse.BasicOperation)

    def benefit(matched, env):
        return random.Random(f"{seed} {[type(op).__name__ for op in matched]}").choice(
            [-1, 0, 1, 2.5, 4]
        )

    return [
        opfuse.Fusion([any_op] * n, cls, benefit=benefit, name=f"{cls.__name__}{n}")
        for n in (1, 2, 3, 5)
    ]


@contextlib.contextmanager
def covers(seed, kinds=tuple(KINDS), style=intervals):
    """No plugin, and fusions over random parts of every chain in the passes given."""
    with contextlib.ExitStack() as stack:
        for kind in kinds:
            fusions = style(KINDS[kind], f"{seed} {kind}")
            stack.enter_context(registered(kind, *fusions))
        stack.enter_context(opfuse.plugins.using(""))
        yield


# Random chains


def _halves(x, size):
    blocks = x.unflatten(-1, (-1, 2, size or x.shape[-1] // 2))
    return blocks[..., 0, :].flatten(-2), blocks[..., 1, :].flatten(-2)


def _clamped(a, b):
    a, b = a.clamp(max=0.5), b.clamp(-0.5, 0.5)
    return a * torch.sigmoid(1.702 * a) * (b + 1)


def _situ(a, b):
    return 4 * torch.tanh(a / 4) * torch.sigmoid(a) * 25 * torch.tanh(b / 25)


def _qgelu(x):
    return x * torch.sigmoid(1.702 * x)


def _gelu(x):
    return F.gelu(x, approximate="tanh")


PLAIN = {
    "GELU": _gelu, "QGELU": _qgelu, "ReLU": torch.relu, "SReLU": lambda x: torch.relu(x) ** 2, "SiLU": F.silu,
    "Identity": lambda x: x, "Quantize": lambda x: x,
}  # fmt: skip
GATED = {
    "GLU": lambda a, b: torch.sigmoid(a) * b, "GEGLU": lambda a, b: _gelu(a) * b, "QGEGLU": lambda a, b: _qgelu(a) * b,
    "ReGLU": lambda a, b: torch.relu(a) * b, "SReGLU": lambda a, b: torch.relu(a) ** 2 * b,
    "SwiGLU": lambda a, b: F.silu(a) * b, "SiTUGLU": _situ, "ClampedSwiGLU": _clamped,
}  # fmt: skip
SCALED = {
    "ScaledSwiGLU": "SwiGLU",
    "ScaledSiTUGLU": "SiTUGLU",
    "ScaledClampedQGeGLU": "ClampedSwiGLU",
}
INTERLEAVED = ("SwiGLU", "SiTUGLU", "ClampedSwiGLU", *SCALED)


class RandomChain:
    """A chain of ``seed``, and the same in plain torch.

    Attributes:
        chain: The Sequential.
        x, extras: Its inputs, leaves; ``writable``: which extras an op adds into.
        steps: Per module: a function of ``(x, params, extras, channels, outputs)`` in plain torch.
    """

    def __init__(self, seed, *, cuts=True):
        self.rng, self.dtype = random.Random(seed), torch.float64
        self.generator = torch.Generator().manual_seed(seed)
        lead = tuple(self.rng.choice((0, 1, 3, 3)) for _ in range(self.rng.randint(0, 3)))
        self.shape = (*lead, self.rng.choice((4, 6, 8)))
        self.modules, self.steps, self.extras, self.writable, self.open = [], [], [], [], {}
        self.trains = self.rng.choice((0.0, 0.5, 0.8, 1.0))
        self.x = self.leaf(self.shape)
        kinds = [
            "linear",
            "plain",
            "gated",
            "norm",
            "scale",
            "dropout",
            "reshape",
            "fork",
            "join",
            "join",
            "scaled",
            "grouped",
        ]
        length = self.rng.randint(1, 12)
        while len(self.modules) < length:
            getattr(self, self.rng.choice([*kinds, "bias", "cut"] if cuts else kinds))()
        self.chain = opfuse.Sequential(*self.modules)
        for param in self.chain.parameters():
            fresh = self.leaf(param.shape)
            param.data, param.requires_grad = fresh.data, fresh.requires_grad

    def leaf(self, shape):
        values = torch.randn(shape, generator=self.generator, dtype=self.dtype)
        return values.requires_grad_(self.rng.random() < self.trains)

    def add(self, module, step, shape=None):
        self.modules.append(module)
        self.steps.append(step)
        self.shape = self.shape if shape is None else shape

    def linear(self):
        out, bias = self.rng.choice((2, 4, 6, 8)), self.rng.random() < 0.6
        if out == 8 and len(self.modules) % 3 == 2:
            return self.parallel(bias)
        module = ops.Linear(self.shape[-1], out, bias=bias, dtype=self.dtype)
        self.add(
            module,
            lambda x, p, *_: F.linear(x, p["weight"], p.get("bias")),
            (*self.shape[:-1], out),
        )
        if self.rng.random() < 0.3:  # what the fusions of fusing.py are for
            self.add(ops.GELU(), lambda x, *_: _gelu(x))

    def parallel(self, bias):
        inputs = self.shape[-1]
        linears = {"a": ops.Linear(inputs, 2), "b": nn.Linear(inputs, 6, bias=bias)}
        module = ops.ParallelLinear(linears).to(self.dtype)

        def step(x, p, *_):
            parts = [F.linear(x, p[f"{name}.weight"], p.get(f"{name}.bias")) for name in linears]
            return torch.cat(parts, -1)

        self.add(module, step, (*self.shape[:-1], 8))

    def bias(self):
        self.add(ops.Bias(self.shape[-1], dtype=self.dtype), lambda x, p, *_: x + p["bias"])

    def plain(self):
        name = self.rng.choice(list(PLAIN))
        self.add(getattr(ops, name)(), lambda x, *_: PLAIN[name](x))

    def gate(self, names):
        """A gated op whose halves fit, what it computes, and the shape it gives; None if there is none."""
        half, odd = divmod(self.shape[-1], 2)
        if odd or not half:
            return None
        name = self.rng.choice(names)
        size = (
            self.rng.choice([None, *(k for k in (1, 2) if half % k == 0)])
            if name in INTERLEAVED
            else None
        )
        kwargs = {"limit": 0.5} if "Clamped" in name else {}
        kwargs |= {"glu_interleave_size": size} if size else {}
        function = GATED[SCALED.get(name, name)]
        return (
            getattr(ops, name)(**kwargs),
            lambda x: function(*_halves(x, size)),
            (*self.shape[:-1], half),
        )

    def gated(self):
        if (gate := self.gate(list(GATED))) is not None:
            self.add(gate[0], lambda x, *_: gate[1](x), gate[2])

    def norm(self):
        kind, width, center = (
            self.rng.choice(("LayerNorm", "RMSNorm", "L2")),
            self.shape[-1],
            self.rng.random() < 0.3,
        )
        shape = (
            self.shape[-2:]
            if len(self.shape) > 1 and self.shape[-2] and self.rng.random() < 0.3
            else (width,)
        )
        if kind == "L2":
            norm = ops.L2Normalization(eps=0.1)
            return self.add(
                norm, lambda x, *_: x / torch.sqrt(x.square().sum(-1, keepdim=True) + 0.1)
            )
        dims = tuple(range(-len(shape), 0))

        def step(x, params, *_):
            x = x - x.mean(dims, keepdim=True) if kind == "LayerNorm" else x
            x = x / torch.sqrt(x.square().mean(dims, keepdim=True) + 0.1)
            return x * (params["weight"] + center) + params.get("bias", 0)

        op = getattr(ops, kind)(shape, eps=0.1, dtype=self.dtype, zero_centered_gamma=center)
        return self.add(op, step)

    def scale(self):
        scale = self.rng.uniform(-2, 2)
        self.add(ops.ConstantScale(scale), lambda x, *_: x * scale)

    def dropout(self):
        p, training = self.rng.choice((0.0, 0.3, 0.6)), self.rng.random() < 0.7
        self.add(ops.Dropout(p).train(training), lambda x, *_: F.dropout(x, p, training))

    def reshape(self):
        *lead, width = self.shape
        rows = torch.Size(lead).numel()
        to = self.rng.choice(
            [(rows, width), (1, rows, width), (*lead, 1, width), (*lead, width // 2, 2)]
        )
        to = to if torch.Size(to).numel() == rows * width else self.shape
        sizes = (-1, *to[1:]) if all(to[1:]) and self.rng.random() < 0.5 else to
        self.add(ops.Reshape(sizes), lambda x, *_: x.reshape(to), to)

    def fork(self, *, hidden=0.5, channel=0.7):
        op, name = (
            ops.MakeExtraOutput(in_place=self.rng.random() < 0.5),
            f"channel {len(self.modules)}",
        )
        public = True
        if self.rng.random() < channel:
            public = self.rng.random() > hidden
            op.set_extra_output_channel(0, name, output_to_caller=public)
            self.open[name] = self.shape

        def step(x, params, extras, channels, outputs):
            channels[name] = x
            if public:
                outputs.append(x.view_as(x))
            return x

        self.add(op, step)

    def extra(self, op, shape, *, writes=False):
        """Feed an extra input from a channel, or from the caller: how the step gets it."""
        fitting = [name for name, other in self.open.items() if other == shape]
        if fitting and self.rng.random() < 0.7:
            name = self.rng.choice(fitting)
            op.set_extra_input_channel(0, name)
            return lambda extras, channels: channels[name]
        self.extras.append(self.leaf(shape))
        self.writable.append(writes)
        return lambda extras, channels: next(extras)

    def join(self):
        in_place = 0 not in self.shape and self.rng.random() < 0.4
        op = ops.AddExtraInput(in_place=in_place)
        get = self.extra(op, self.shape, writes=in_place)
        self.add(op, lambda x, params, extras, channels, outputs: x + get(extras, channels))

    def scaled(self):
        gate = self.gate(list(SCALED)) if self.rng.random() < 0.7 else None
        if gate is None:  # scales that a channel can have: as many as there are features
            self.fork(hidden=0.9, channel=1)
            to = (*self.shape, 1)
            self.add(ops.Reshape(to), lambda x, *_: x.reshape(to), to)
            gate = ops.ScaledSReLU(), PLAIN["SReLU"], to
        op, function, shape = gate
        get = self.extra(op, self.shape[:-1])
        self.add(
            op,
            lambda x, p, extras, channels, _: function(x) * get(extras, channels).unsqueeze(-1),
            shape,
        )

    def grouped(self):
        """Linear layers for groups of rows; some share their split sizes by a name."""
        if len(self.shape) < 2:
            return
        rows, count, out = self.shape[0], self.rng.choice((1, 2, 3)), self.rng.choice((2, 4, 6))
        bias, name = self.rng.random() < 0.6, f"sizes {len(self.modules)}"
        op = ops.GroupedLinear(count, self.shape[-1], out, bias=bias, dtype=self.dtype)
        fitting = [name for name, of in self.open.items() if of == ("sizes", rows, count)]
        known = self.rng.choice(fitting) if fitting and self.rng.random() < 0.7 else None
        if known is None:
            ends = sorted(self.rng.randint(0, rows) for _ in range(count - 1))
            self.extras.append(torch.tensor([0, *ends, rows]).diff())
            self.writable.append(False)
            self.open[name] = "sizes", rows, count
        op.set_extra_input_name(0, known or name)

        def step(x, p, extras, channels, outputs):
            sizes = channels[known] if known else next(extras)
            channels[name] = sizes
            parts = enumerate(x.split(sizes.tolist()))
            return torch.cat(
                [F.linear(part, p[f"weight{i}"], p.get(f"bias{i}")) for i, part in parts]
            )

        self.add(op, step, (*self.shape[:-1], out))

    def cut(self):
        """Another module, or an op with a hook: no channel goes across."""
        if self.rng.random() < 0.5:
            self.add(nn.Tanh(), lambda x, *_: torch.tanh(x))
        else:
            self.rng.choice((self.linear, self.plain, self.norm))()
            self.modules[-1].register_forward_hook(lambda module, args, output: None)
        self.open.clear()

    # Running both

    def leaves(self):
        return [self.x, *self.extras, *self.chain.parameters()]

    def forward(self):
        """The chain's outputs, on copies of what it may write into."""
        extras = [e * 1 if w else e for e, w in zip(self.extras, self.writable, strict=True)]
        torch.manual_seed(0)
        result = self.chain(self.x, *extras)
        return result if isinstance(result, tuple) else (result,)

    def reference(self):
        """Outputs and leaves of the same in plain torch."""
        x, *extras = (
            t.detach().clone().requires_grad_(t.requires_grad) for t in (self.x, *self.extras)
        )
        leaves, given, channels, outputs, y = [x, *extras], iter(extras), {}, [], x * 1
        torch.manual_seed(0)
        for module, step in zip(self.modules, self.steps, strict=True):
            params = {
                name: p.detach().clone().requires_grad_(p.requires_grad)
                for name, p in module.named_parameters()
            }
            leaves += params.values()
            y = step(y, params, given, channels, outputs)
        assert next(given, None) is None
        return (y, *outputs), leaves

    def weights(self, outputs):
        generator = torch.Generator().manual_seed(1)
        return [torch.randn(y.shape, generator=generator, dtype=self.dtype) for y in outputs]


def backward(outputs, weights, **kwargs):
    """Backward of the outputs that have one."""
    chosen = [(y, w) for y, w in zip(outputs, weights, strict=True) if y.requires_grad]
    if chosen:
        torch.autograd.backward(*map(list, zip(*chosen, strict=True)), **kwargs)


# A plan that competing plugins make together


def plan_in_some_order(seed, **limit):
    """The plan of a fixed chain with fusions of three plugins, registered in an order of ``seed``."""
    rng, any_op = random.Random(seed), opfuse.Subclasses(opfuse.BasicOperation)
    plugins = {
        "c": {
            "joint_fusions": [opfuse.Fusion([ops.GELU, any_op], Joint, name="joint", priority=1)]
        },
        "b": {},
        "a": {},
    }
    for number, hooks in enumerate(plugins.values()):
        for kind in ("forward", "backward"):
            hooks[f"{kind}_fusions"] = [
                opfuse.Fusion(
                    [any_op] * n,
                    KINDS[kind],
                    name=f"{kind} {n}",
                    benefit=n // 2,
                    priority=number % 2,
                )
                for n in (2, 3, 4)
            ]
            rng.shuffle(hooks[f"{kind}_fusions"])
    order = list(plugins)
    rng.shuffle(order)
    basic = [
        ops.Linear(4, 4),
        ops.GELU(),
        ops.MakeExtraOutput(),
        ops.LayerNorm(4),
        ops.Linear(4, 4),
        ops.SiLU(),
    ]
    chain = opfuse.Sequential(*basic, ops.Identity(), ops.GELU(), ops.Identity())
    with opfuse.plugins.isolated(), opfuse.options(**limit):
        for name in order:
            plugin = make_plugin(**plugins[name])
            opfuse.plugins.register(plugin, name=name, distribution=f"dist-{name}")
        (call,) = opfuse.explain(chain, torch.ones(2, 4, requires_grad=True)).calls
    return call.plan
