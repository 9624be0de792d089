"""Modules to convert, and what they give, compared."""

import torch
from torch import nn

WIDTH = 24


class Gated(nn.Module):
    def __init__(self, act=None, bias=False):
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 40, bias=bias), nn.Linear(WIDTH, 40, bias=bias)
        self.down, self.act = nn.Linear(40, WIDTH, bias=bias), act or nn.SiLU()

    def forward(self, hidden):
        return self.down(self.up(hidden) * self.act(self.gate(hidden)))


class RootMean(nn.Module):
    """A norm of an unknown class, as many models bring one."""

    def __init__(self, eps=1e-5, offset=0.0):
        super().__init__()
        self.weight, self.eps, self.offset = nn.Parameter(torch.rand(WIDTH)), eps, offset

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return wide.to(x.dtype) * (self.offset + self.weight)


def gradients(model, *inputs, **kwargs):
    y = model(*inputs, **kwargs)
    wanted = [x for x in (*inputs, *model.parameters()) if x.requires_grad]
    torch.manual_seed(1)
    return [y, *torch.autograd.grad(y, wanted, torch.randn_like(y), allow_unused=True)]


def assert_same(model, other, *inputs, rtol=2e-5, **kwargs):
    for mine, theirs in zip(
        gradients(model, *inputs, **kwargs), gradients(other, *inputs, **kwargs), strict=True
    ):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert mine.dtype is theirs.dtype and mine.shape == theirs.shape
            torch.testing.assert_close(
                mine, theirs, rtol=rtol, atol=rtol * max([1e-6, *theirs.detach().abs().flatten()])
            )


def an_input(*rows, dtype=torch.float32):
    torch.manual_seed(2)
    return torch.randn(*(rows or (2, 5)), WIDTH).to(dtype).requires_grad_()
