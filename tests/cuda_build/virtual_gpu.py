"""A virtual GPU: PyTorch's dispatcher takes its tensors for CUDA tensors, and their numbers are in host memory.

PyTorch's own operations run on the CPU. A custom operation is called through its real schema, as the CUDA build
registers it, and computed by the function that `kernels.py` has under its name; there is none for most, and a call of
one of those fails. A Triton kernel is compiled for the GPU with the arguments of its launch, and then interpreted.
CUDA graphs are recorded and replayed: a replay runs the recorded operations again, on the memory of the capture.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("cuda", 0)
CAPABILITY = (9, 0)
MEMORY_BYTES = 80 << 30

_aten = torch.ops.aten
_MOVES = {_aten._to_copy.default, _aten.copy_.default}
_INDEXES = {_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default, _aten._index_put_impl_.default}


class VirtualTensor(Tensor):
    """A tensor on the virtual GPU. `host` has the same memory, on the CPU."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> VirtualTensor:
        made: VirtualTensor = torch.Tensor._make_subclass(
            cls, host.detach(), False, dispatch_device=True, device_for_backend_keys=DEVICE
        )
        made.host = host
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return GPU.run(func, args, kwargs or {})

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")

    __array__ = numpy  # type: ignore[assignment]

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def new_tensor(self, data: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:  # type: ignore[override]
        return torch.tensor(data, dtype=dtype or self.dtype, device=device or DEVICE)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"VirtualTensor({tuple(self.host.shape)}, {self.host.dtype})"


class Mode(TorchDispatchMode):
    """Sends operations that make tensors on the GPU, and those of pinned memory, to it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return GPU.run(func, args, kwargs or {})


class VirtualGpu:
    """Runs operations. There is one a process, as PyTorch's patched functions are the process's."""

    def __init__(self) -> None:
        self.kernels: dict[str, Callable[..., Any]] = {}
        """By the name of a custom operation, such as `_C::rms_norm`: what computes it, on host tensors."""

        self.launches: Counter[str] = Counter()
        """Custom operations and Triton kernels that have run."""

        self.recording: list[Callable[[], None]] | None = None
        self._pinned: dict[int, Tensor] = {}

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """One operation of PyTorch's dispatcher. Raises RuntimeError as CUDA does for operands on two devices."""
        if func is torch.ops.prim.device.default:
            return DEVICE
        flat = tree_flatten((args, kwargs))[0]
        if func in (_aten.is_pinned.default, _aten._pin_memory.default, _aten.pin_memory.default):
            return self._pin(func, args[0])
        there = any(isinstance(each, VirtualTensor) for each in flat)
        made_there = (
            "device" in kwargs and kwargs["device"] is not None and torch.device(kwargs["device"]).type == "cuda"
        )
        pinned = kwargs.pop("pin_memory", False)
        if not (there or made_there):
            result = func(*args, **kwargs)
            if pinned and isinstance(result, Tensor):
                self._pinned[result.untyped_storage().data_ptr()] = result
            return result
        if func.namespace == "vllm":  # written in Python, of operations that come here one by one
            self.launches[func._schema.name] += 1
            with Mode():
                return func._op_dk(torch._C.DispatchKey.CUDA, *args, **kwargs)
        if torch.is_inference_mode_enabled() and func._can_decompose():
            with Mode():
                return func.decompose(*args, **kwargs)
        if func in _MOVES:
            return self._move(func, args, kwargs)
        if func is _aten.record_stream.default:
            return None
        if func is _aten._local_scalar_dense.default:
            return func(args[0].host)
        if there:
            self._check_devices(func, flat)
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        return self._compute(func, args, kwargs)

    def _check_devices(self, func: Any, flat: list[Any]) -> None:
        for each in flat:
            if isinstance(each, Tensor) and not isinstance(each, VirtualTensor) and each.dim() and func not in _INDEXES:
                raise RuntimeError(
                    f"{func}: expected all tensors to be on the same device, found cuda:0 and cpu {tuple(each.shape)}"
                )

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        call: Callable[..., Any] = func
        if func.namespace not in ("aten", "prim", "prims"):
            name = func._schema.name
            if (kernel := self.kernels.get(name)) is None:
                raise NotImplementedError(f"{func._schema} is called, and no function here computes it")
            self.launches[name] += 1
            call = kernel
        host_args, host_kwargs = tree_map(_host, (args, kwargs))
        result = call(*host_args, **host_kwargs)
        self.record(call, host_args, host_kwargs, result)
        given = {id(each.host): each for each in tree_flatten((args, kwargs))[0] if isinstance(each, VirtualTensor)}
        return tree_map(lambda each: self._wrap(each, given), result)

    def _wrap(self, value: Any, given: dict[int, VirtualTensor]) -> Any:
        if not isinstance(value, Tensor):
            return value
        return given[id(value)] if id(value) in given else VirtualTensor(value)

    def record(self, call: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> None:
        """Keeps an operation for the graph that is captured, if one is. A replay writes where the capture wrote."""
        if self.recording is None:
            return
        written = [each for each in tree_flatten(result)[0] if isinstance(each, Tensor)]
        known = {
            each.untyped_storage().data_ptr() for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)
        }

        def again() -> None:
            anew = [each for each in tree_flatten(call(*args, **kwargs))[0] if isinstance(each, Tensor)]
            for to, from_ in zip(written, anew, strict=True):
                if to.untyped_storage().data_ptr() not in known:  # else it is an argument, or a view of one
                    to.copy_(from_)

        self.recording.append(again)

    def _move(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is _aten.copy_.default:
            target, source = args[:2]
            host_args = tree_map(_host, args)
            func(*host_args, **kwargs)
            if isinstance(target, VirtualTensor) or isinstance(source, VirtualTensor):
                self.record(func, host_args, kwargs, host_args[0])
            return target
        source, to = args[0], kwargs.pop("device", None)
        was_there = isinstance(source, VirtualTensor)
        is_there = was_there if to is None else torch.device(to).type == "cuda"
        result = func(_host(source), **kwargs)
        if not is_there:
            return result
        if was_there:
            self.record(func, (_host(source),), kwargs, result)
        return VirtualTensor(result)

    def _pin(self, func: Any, tensor: Tensor) -> Any:
        if func is _aten.is_pinned.default:
            return not isinstance(tensor, VirtualTensor) and tensor.untyped_storage().data_ptr() in self._pinned
        pinned = tensor.clone()
        self._pinned[pinned.untyped_storage().data_ptr()] = pinned
        return pinned


GPU = VirtualGpu()


def _host(value: Any) -> Any:
    return value.host if isinstance(value, VirtualTensor) else value


class Stream:
    """Stands for torch.cuda.Stream: operations run as they are issued, in one order."""

    _numbers = itertools.count(1)

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device, self.cuda_stream, self.stream_id = DEVICE, next(self._numbers), 0

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        return event or Event()


class Event:
    """Stands for torch.cuda.Event and torch.Event."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 1.0


class Graph:
    """Stands for torch.cuda.CUDAGraph."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._operations: list[Callable[[], None]] = []

    def replay(self) -> None:
        GPU.launches["graph replay"] += 1
        for operation in self._operations:
            operation()

    def reset(self) -> None: ...

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        assert GPU.recording is None, "a graph is captured while another one is"
        GPU.recording = self._operations
        try:
            yield
        finally:
            GPU.recording = None


class Generator(torch.Generator):
    """Stands for a generator on the GPU."""

    def __new__(cls, device: Any = None) -> Generator:
        return super().__new__(cls, device="cpu")


_STREAM = Stream()


def _made_on_host(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """torch.tensor and torch.as_tensor fill memory themselves, without the dispatcher."""

    @functools.wraps(make)
    def made(data: Any, *, dtype: Any = None, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        if isinstance(data, VirtualTensor):
            return data.to(device=device, dtype=dtype)
        wanted = torch.device(device or torch.utils._device.CURRENT_DEVICE or "cpu")
        tensor = make(data, dtype=dtype, device="cpu", **kwargs)
        if wanted.type != "cpu":
            return tensor.to(wanted)
        return tensor.pin_memory() if pin_memory else tensor

    return made


def install() -> None:
    """Makes PyTorch see the virtual GPU, in this process and thread, for good."""
    cuda, accelerator = torch.cuda, torch.accelerator
    properties = SimpleNamespace(
        name="NVIDIA H100 80GB HBM3", major=CAPABILITY[0], minor=CAPABILITY[1], total_memory=MEMORY_BYTES,
        multi_processor_count=132, warp_size=32, max_threads_per_multi_processor=2048, L2_cache_size=50 << 20,
        shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472, regs_per_multiprocessor=65536,
        uuid="GPU-0", is_integrated=False, gcnArchName="",
    )  # fmt: skip

    def nothing(*_: Any, **__: Any) -> None: ...

    @contextlib.contextmanager
    def no_context(*_: Any, **__: Any) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def graph(captured: Graph, *_: Any, **__: Any) -> Iterator[None]:
        with captured.capturing():
            yield

    counts = {
        "is_available": True, "is_initialized": True, "device_count": 1, "current_device": 0,
        "get_device_name": properties.name, "get_device_properties": properties, "get_device_capability": CAPABILITY,
        "current_stream": _STREAM, "default_stream": _STREAM, "mem_get_info": (MEMORY_BYTES, MEMORY_BYTES),
        "memory_allocated": 0, "memory_reserved": 0, "max_memory_allocated": 0, "max_memory_reserved": 0,
        "memory_stats": {"allocated_bytes.all.peak": 0}, "is_current_stream_capturing": False,
        "graph_pool_handle": (0, 0), "get_memory_info": (MEMORY_BYTES, MEMORY_BYTES), "current_device_index": 0,
        "current_accelerator": torch.device("cuda"), "get_device_index": 0,
    }  # fmt: skip
    for module in (cuda, accelerator, cuda.memory):
        for name, value in counts.items():
            if hasattr(module, name):
                setattr(module, name, functools.partial(lambda value, *_, **__: value, value))
        for name in (
            "_lazy_init", "init", "set_device", "set_device_index", "set_device_idx", "synchronize", "empty_cache",
            "reset_peak_memory_stats", "ipc_collect", "set_stream", "manual_seed", "manual_seed_all",
        ):  # fmt: skip
            if hasattr(module, name):
                setattr(module, name, nothing)
    cuda.Stream, cuda.Event, torch.Event, torch.Stream = Stream, Event, Event, Stream  # type: ignore[misc, assignment]
    cuda.CUDAGraph, cuda.graph, cuda.stream, cuda.device = Graph, graph, no_context, no_context  # type: ignore[misc, assignment]
    cuda.graphs.graph, cuda.graphs.CUDAGraph = graph, Graph  # type: ignore[misc, assignment]
    torch.Generator = Generator  # type: ignore[misc]
    torch.tensor, torch.as_tensor = _made_on_host(torch.tensor), _made_on_host(torch.as_tensor)
    torch._C._cuda_getCurrentRawStream = lambda *_: 0  # type: ignore[attr-defined]
    Mode().__enter__()


def to_gpu(module: torch.nn.Module) -> None:
    """Moves a loaded model's parameters and buffers. vLLM's parameters are subclasses of their own, which load on the
    CPU as they are."""
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and not isinstance(tensor, VirtualTensor):
                    tensors[name] = VirtualTensor(tensor.data)  # type: ignore[assignment]


def no_engine_left() -> None:
    """Lets another engine start in this process."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()
