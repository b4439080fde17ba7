"""A device on the CPU that shows what a CPU hides: where the host waits for it, and memory that is used too early.

Inside `CountingDevice()` a tensor that is put on "cuda" says it is there, holds its numbers in the host's memory, and
runs torch's CPU kernels. What CUDA refuses is refused (numpy() of it, tensors of both sides in one operation); each
time that CUDA would have the host wait is written down:

- `reads`: the host looks at what is on the device: tolist, item, bool, cpu(), a copy to ordinary memory, and what has
  to know how many there are (nonzero, a mask as index, repeat_interleave).
- `uploads`: copies to the device from memory that is not pinned.
- `waits`: the host waits for an event that has not passed, for a stream, or for the device. Events, streams and
  `synchronize` of `torch.cuda` are this device's meanwhile.

Kernels and copies that do not wait take until the host waits for them, or reads. Three mistakes fail:

- Pinned memory that is written to while its copy to the device is under way: when that copy ends, or the device is
  left.
- A value that is read from pinned memory while its copy to there is under way: asked of the tensor it fails, and
  whoever looks at the memory itself finds `POISON`.
- A synchronisation that is missing, or one too many, between `synchronises` and its end. `busy` says whether anything
  may still run.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("cuda", 0)
POISON = 0xA5
"""What every byte holds that has not arrived."""

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
    """Stands for torch.cuda.Event."""

    def __init__(self, device: CountingDevice) -> None:
        self._device, self._until = device, 0

    def record(self, stream: Any = None) -> None:
        self._until = self._device._given

    def query(self) -> bool:
        return self._until <= self._device._done

    def synchronize(self) -> None:
        if not self.query():
            self._device.waits.append("event")
            self._device._arrive(self._until)


class Stream:
    """Stands for torch.cuda.Stream. Work of all streams runs in the order in which it was given."""

    def __init__(self, device: CountingDevice) -> None:
        self._device = device

    def synchronize(self) -> None:
        self._device._synchronize("stream")

    def wait_stream(self, stream: Stream) -> None:
        pass


class CountingDevice(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []
        self.uploads: list[str] = []
        self.waits: list[str] = []
        self._pinned: dict[int, Tensor] = {}
        """By the address of their memory; kept, so that no other tensor gets it."""

        self._given = self._done = 0
        """Kernels and copies: how many there have been, and how many of them the host knows to be over."""

        self._copies: deque[tuple[int, Callable[[], None]]] = deque()
        """Those under way: the number of each, and what its end does."""

        self._arriving: dict[int, int] = {}
        """Addresses of pinned memory, and the number of the last copy to there."""

    def __enter__(self) -> CountingDevice:
        patch = self._patch = pytest.MonkeyPatch()
        # Torch gives the tensor itself back where there is no GPU, and asks no mode.
        patch.setattr(Tensor, "pin_memory", lambda tensor: self._pin(tensor.clone()))
        patch.setattr(torch.cuda, "Event", lambda *_, **__: Event(self))
        patch.setattr(torch.cuda, "Stream", lambda *_, **__: Stream(self))
        patch.setattr(torch.cuda, "current_stream", lambda device=None: Stream(self))
        patch.setattr(torch.cuda, "stream", contextlib.nullcontext)
        patch.setattr(torch.cuda, "synchronize", lambda device=None: self._synchronize("device"))
        super().__enter__()
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        super().__exit__(kind, *error)
        self._patch.undo()
        if kind is None:
            self._arrive(self._given)

    @property
    def busy(self) -> bool:
        """Whether anything that the device was given, a view of a tensor included, may still run."""
        return self._done < self._given

    @contextlib.contextmanager
    def synchronises(self, times: int, what: str, uploads: int = 0) -> Iterator[None]:
        """Fails unless the host waits for the device so many times in it, and for at most so many uploads."""
        for each in (self.reads, self.uploads, self.waits):
            each.clear()
        yield
        seen = f"{what}: reads {self.reads}, waits {self.waits}, uploads {self.uploads}"
        assert len(self.reads) + len(self.waits) == times, seen
        assert len(self.uploads) <= uploads, seen

    def kernel(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What one launch of a kernel does, whose results a function of host tensors gives. Both may be dataclasses."""
        self._given += 1
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
        if func in _READ and not there:
            self._has_arrived(args[0])
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
        if name != "__get__" and (result is None or any(isinstance(part, Tensor) for part in tree_flatten(result)[0])):
            self._given += 1
        return tree_map(self._put, result)

    def _check(self, func: Any, name: str, args: Any, kwargs: Any, flat: list[Any]) -> None:
        masked = func in _INDEXED and _has_mask(args)
        if func in _READ or (func in _COUNTS and "output_size" not in kwargs) or masked:
            self.reads.append(name)
            self._arrive(self._given)
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
            target = torch.empty_like(converted)
            return self._copy(target if waits else self._pin(target), self._put(converted), waits)
        if converted is source or waits:
            converted = self._copy(self._put(torch.empty_like(converted)), source, waits)
        return self._put(converted)

    def _copy(self, target: Tensor, source: Tensor, waits: bool) -> Tensor:
        to, from_ = _host(target), _host(source)
        self._given += 1
        if isinstance(target, _There) == isinstance(source, _There):
            to.copy_(from_)
        elif isinstance(source, _There):
            if waits or not self._is_pinned(to):
                self.reads.append("copy")
                self._arrive(self._given)
                to.copy_(from_)
            else:
                arrived = from_.to(to.dtype, copy=True)
                to.view(-1).view(torch.uint8).fill_(POISON)
                self._arriving[_address(to)] = self._given
                self._copies.append((self._given, lambda: _write(to, arrived)))
        else:
            to.copy_(from_)
            if waits or not self._is_pinned(from_):
                self.uploads.append("copy")
            else:
                sent = to.clone()  # what is there may be changed at once
                self._copies.append((self._given, lambda: self._unchanged(from_, sent)))
        return target

    def _unchanged(self, source: Tensor, sent: Tensor) -> None:
        if not torch.equal(source.to(sent.dtype).view(-1), sent.view(-1)):
            raise AssertionError("pinned memory was written to before its copy to the device was done")

    def _has_arrived(self, tensor: Tensor) -> None:
        if self._arriving.get(_address(tensor), 0) > self._done:
            raise AssertionError("pinned memory was read before its copy from the device was done")

    def _synchronize(self, what: str) -> None:
        self.waits.append(what)
        self._arrive(self._given)

    def _arrive(self, until: int) -> None:
        self._done = max(self._done, until)
        # Written to as in a kernel, where memory of inference mode may be.
        with torch._C.DisableTorchFunction(), torch.inference_mode():
            while self._copies and self._copies[0][0] <= until:
                self._copies.popleft()[1]()

    def _pin(self, tensor: Tensor) -> Tensor:
        self._pinned[_address(tensor)] = tensor
        return tensor

    def _is_pinned(self, tensor: Tensor) -> bool:
        return _address(tensor) in self._pinned

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


def _address(tensor: Tensor) -> int:
    """Return the address of a tensor's memory, which views share."""
    return tensor.untyped_storage().data_ptr()


def _write(target: Tensor, values: Tensor) -> None:
    target.copy_(values)


def _has_mask(args: Any) -> bool:
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    scalar = len(args) > 2 and not (isinstance(args[2], Tensor) and args[2].dim())  # filled, without a look at the mask
    return not scalar and any(
        isinstance(part, _There) and part.as_subclass(Tensor).dtype is torch.bool for part in index
    )
