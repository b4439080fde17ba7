"""Runs Triton launches on the virtual GPU.

A kernel is compiled by Triton and its ptxas for the arguments of the launch, and then computed by Triton's interpreter.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction, _patch_lang
from triton.runtime.jit import JITFunction, MockTensor

from tests.cuda_build.virtual_gpu import GPU, VirtualTensor


class _Argument(MockTensor):
    """What the compiler asks of a tensor: its type and the alignment of its memory."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor.dtype, list(tensor.shape))
        self._tensor = tensor

    def stride(self) -> tuple[int, ...]:
        return self._tensor.stride()

    def data_ptr(self) -> int:  # type: ignore[override]
        return self._tensor.storage_offset() * self._tensor.element_size()


def _refuse_host(name: str, value: Any) -> None:
    if isinstance(value, Tensor) and not isinstance(value, VirtualTensor):
        raise ValueError(f"{name}: pointer argument cannot be accessed from Triton (cpu tensor?)")


def install() -> None:
    compile_and_run = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            _refuse_host(self.fn.__name__, value)
        mocks = [_Argument(each) if isinstance(each, Tensor) else each for each in args]
        named = {name: _Argument(each) if isinstance(each, Tensor) else each for name, each in kwargs.items()}
        compiled = compile_and_run(self, *mocks, grid=grid, warmup=True, **named)
        if warmup:
            return compiled
        GPU.launches[self.fn.__name__] += 1
        host = [each.host if isinstance(each, VirtualTensor) else each for each in args]
        host_named = {name: each.host if isinstance(each, VirtualTensor) else each for name, each in kwargs.items()}

        def interpret() -> None:
            InterpretedFunction(self.fn).run(*host, grid=grid, warmup=False, **host_named)

        interpret()
        GPU.record(interpret, (), {}, None)
        return compiled

    JITFunction.run = run
    JITFunction.__call__ = _interpret_inner


def _interpret_inner(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A function that an interpreted kernel calls. Triton's own does not take back what it changes in `tl`."""
    changed = _patch_lang(self.fn)
    try:
        return InterpretedFunction(self.fn).rewrite()(*args, **kwargs)
    finally:
        changed.restore()
