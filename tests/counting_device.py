"""A device on the CPU that shows what a CPU hides: where the host waits for it, and copies that are read too early.

Inside `CountingDevice()` a tensor that is put on "cuda" says it is there, holds its numbers in the host's memory, and
runs torch's CPU kernels. What CUDA refuses is refused (numpy() of it, tensors of both sides in one operation); each
time that CUDA would have the host wait is written down:

- `reads`: the host looks at what is on the device: tolist, item, bool, cpu(), a copy to ordinary memory, and what has
  to know how many there are (nonzero, a mask as index, repeat_interleave).
- `uploads`: copies to the device from memory that is not pinned.

A copy to pinned memory that does not wait leaves `POISON` there until its event, or the device, is waited for. A copy
from pinned memory that does not wait takes until then, too: whoever has written there meanwhile is told.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("cuda", 0)
POISON = 0xA5
"""In every byte."""

_IS = {name: getattr(Tensor, name).__get__ for name in ("device", "is_cpu", "is_cuda")}
_READ = (Tensor.tolist, Tensor.item, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__)
_COUNTS = (
    Tensor.nonzero, torch.nonzero, Tensor.masked_select, torch.masked_select, Tensor.unique, torch.unique,
    Tensor.unique_consecutive, torch.unique_consecutive, torch.equal, Tensor.equal, torch.allclose,
    Tensor.repeat_interleave, torch.repeat_interleave, torch.bincount,
)  # fmt: skip
_INDEXED = (Tensor.__getitem__, Tensor.__setitem__, Tensor.index_put_, Tensor.index_put)
_ITSELF = (Tensor.set_, Tensor.resize_, Tensor.unsqueeze_, Tensor.squeeze_)
"""They change the tensor, not only what is in its memory."""


class _There(Tensor):
    """A tensor on the device."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


class Event:
    """Of `CountingDevice.event`: as torch.cuda.Event."""

    def __init__(self, device: CountingDevice) -> None:
        self._device, self._until = device, 0

    def record(self) -> None:
        self._until = len(self._device._pending)

    def synchronize(self) -> None:
        self._device._arrive(self._until)


class CountingDevice(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []
        self.uploads: list[str] = []
        self._pinned: dict[int, Tensor] = {}
        """By the address of their memory; kept, so that no other tensor gets it."""

        self._pending: list[Callable[[], None] | None] = []

    def __enter__(self) -> CountingDevice:
        # Torch gives the tensor itself back where there is no GPU, and asks no mode.
        Tensor.pin_memory = lambda tensor: self._pin(tensor.clone())  # type: ignore[method-assign]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        del Tensor.pin_memory

    def event(self) -> Event:
        return Event(self)

    def kernel(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What one launch of a kernel does, whose results a function of host tensors gives. Both may be dataclasses."""
        with torch._C.DisableTorchFunction():
            return tree_map(self._put, function(*tree_map(_host, args), **tree_map(_host, kwargs)))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        flat = tree_flatten((args, kwargs))[0]
        there = any(isinstance(part, _There) for part in flat)
        name = getattr(func, "__name__", str(func))
        if name == "__get__" and there:
            if func == _IS["device"]:
                return DEVICE
            if func == _IS["is_cpu"]:
                return False
            if func == _IS["is_cuda"]:
                return True
        if func in (Tensor.numpy, Tensor.__array__) and there:
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")
        if func in (Tensor.to, Tensor.cpu, Tensor.copy_, Tensor.cuda):
            return self._moved(func, args, kwargs)
        if func is Tensor.is_pinned:
            return not there and self._is_pinned(args[0])
        if kwargs.pop("pin_memory", False):
            return self._pin(func(*args, **kwargs))
        if func in _ITSELF and there:
            return func(*args, **kwargs)
        if "device" in kwargs and kwargs["device"] is not None:
            there = torch.device(kwargs["device"]).type == DEVICE.type
            kwargs["device"] = "cpu"
            if there and func in (torch.tensor, torch.as_tensor):
                self.uploads.append(name)
        elif there and func is Tensor.new_tensor:
            self.uploads.append(name)
        elif there:
            self._check(func, name, args, kwargs, flat)
        result = func(*tree_map(_host, args), **tree_map(_host, kwargs))
        if func in _READ or not there:
            return result
        return tree_map(self._put, result)

    def _check(self, func: Any, name: str, args: Any, kwargs: Any, flat: list[Any]) -> None:
        masked = func in _INDEXED and _has_mask(args)
        if func in _READ or (func in _COUNTS and "output_size" not in kwargs) or masked:
            self.reads.append(name)
            self._arrive(len(self._pending))
        elsewhere = [part for part in flat if isinstance(part, Tensor) and not isinstance(part, _There) and part.dim()]
        if elsewhere and func in _INDEXED:
            self.uploads.append(name)
        elif elsewhere:
            raise RuntimeError(f"{name}: expected all tensors to be on the same device, found cuda:0 and cpu")

    def _moved(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is Tensor.copy_:
            target, source = args[:2]
            waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
            return self._copy(target, source, waits)
        source, rest = args[0], list(args[1:])
        was = DEVICE.type if isinstance(source, _There) else "cpu"
        asked = "cpu" if func is Tensor.cpu else None
        for place, part in enumerate([*rest, kwargs.get("device")]):
            if isinstance(part, str | torch.device):
                asked = torch.device(part).type
                if place < len(rest):
                    rest[place] = "cpu"
        kwargs.pop("device", None)
        waits = not kwargs.pop("non_blocking", False)
        converted = _host(source) if func is Tensor.cpu else func(_host(source), *rest, **kwargs)
        if asked is None or asked == was:
            return self._put(converted) if was == DEVICE.type else converted
        if was == DEVICE.type:
            return self._copy(torch.empty_like(converted), self._put(converted), True)
        if converted is source or waits:
            converted = self._copy(self._put(torch.empty_like(converted)), source, waits)
        return self._put(converted)

    def _copy(self, target: Tensor, source: Tensor, waits: bool) -> Tensor:
        to, from_ = _host(target), _host(source)
        if isinstance(target, _There) == isinstance(source, _There):
            to.copy_(from_)
        elif isinstance(source, _There):
            if waits or not self._is_pinned(to):
                self.reads.append("copy")
                self._arrive(len(self._pending))
                to.copy_(from_)
            else:
                arrived = from_.to(to.dtype, copy=True)
                to.view(-1).view(torch.uint8).fill_(POISON)
                self._pending.append(lambda: _write(to, arrived))
        else:
            to.copy_(from_)
            if waits or not self._is_pinned(from_):
                self.uploads.append("copy")
            else:
                sent = to.clone()  # what is there may be changed at once
                self._pending.append(lambda: self._unchanged(from_, sent))
        return target

    def _unchanged(self, source: Tensor, sent: Tensor) -> None:
        if not torch.equal(source.to(sent.dtype).view(-1), sent.view(-1)):
            raise AssertionError("pinned memory was written to before its copy to the device was done")

    def _arrive(self, until: int) -> None:
        with torch._C.DisableTorchFunction():
            for index in range(until):
                work, self._pending[index] = self._pending[index], None
                if work is not None:
                    work()

    def _pin(self, tensor: Tensor) -> Tensor:
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def _is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    def _put(self, value: Any) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return _each_field(value, self._put)
        return value.as_subclass(_There) if isinstance(value, Tensor) else value


def _host(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _each_field(value, _host)
    return value.as_subclass(Tensor) if isinstance(value, _There) else value


def _each_field(value: Any, change: Callable[[Any], Any]) -> Any:
    fields = {field.name: change(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return dataclasses.replace(value, **fields)


def _write(target: Tensor, values: Tensor) -> None:
    target.copy_(values)


def _has_mask(args: Any) -> bool:
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    scalar = len(args) > 2 and not (isinstance(args[2], Tensor) and args[2].dim())  # filled, without a look at the mask
    return not scalar and any(
        isinstance(part, _There) and part.as_subclass(Tensor).dtype is torch.bool for part in index
    )
