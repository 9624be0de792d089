"""What tensors over codes share: they have no memory of their own, and torch reads their values."""

from __future__ import annotations

from typing import Any

import torch

from opfuse.core.quantization import CodedTensor


class TensorOverCodes(CodedTensor):
    """A tensor whose memory is that of its codes."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def untyped_storage(self) -> torch.UntypedStorage:
        """An empty storage: the codes hold the data."""
        return torch.UntypedStorage(0, device=self.device)  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.is_view and torch.is_inference_mode_enabled() and not args[0].is_inference():
            # torch gives a view the version counter of its base, and an inference tensor has none
            with torch.inference_mode(False), torch.no_grad():
                return cls._run(func, args, kwargs or {})
        return cls._run(func, args, kwargs or {})

    @classmethod
    def _run(cls, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operation of torch."""
        raise NotImplementedError


class Values(torch.autograd.Function):
    """The values as a function reads them; the gradient is theirs."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, read: Any) -> Any:
        """``read(tensor)``."""
        return read(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """The gradient."""
        return grad, None
