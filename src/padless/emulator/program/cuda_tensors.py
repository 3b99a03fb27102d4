"""Tensors on a GPU that is not there: torch's "cuda" is memory of the CPU, and tensors say that they are on the GPU.

A tensor is on the GPU if it was made there or if an operation took one that is. It is marked by an attribute; to torch
itself it is on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial, wraps
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

from padless.emulator.program.autocast import cast
from padless.emulator.program.device import Chip
from padless.emulator.program.device_time import DeviceTime
from padless.emulator.program.dlpack import CUDA, by_capsules
from padless.emulator.program.dlpack import on_gpu as told_cuda

MARK = "_padless_on_gpu"


def is_gpu(device: Any) -> bool:
    """Whether a device argument names the GPU."""
    named = device if isinstance(device, str) else getattr(device, "type", None)
    return isinstance(named, str) and named.startswith("cuda")


Refuse = Callable[[str], None]


def pretend(chip: Chip, refuse: Refuse, device: DeviceTime) -> Callable[[ModuleType], None]:
    """A change of torch: it sees `chip`. refuse: is given a sentence about what is not there."""

    def change(torch: ModuleType) -> None:
        cuda = torch.cuda
        Event.device = device
        absent = partial(fail, refuse, GRAPHS)
        answers: dict[str, Any] = {
            "is_available": lambda: True, "is_initialized": lambda: True, "init": lambda: None,
            "device_count": lambda: 1, "empty_cache": lambda: None,
            "current_device": lambda: 0, "set_device": lambda device: None, "synchronize": lambda device=None: None,
            "get_device_capability": lambda device=None: chip.capability,
            "get_device_name": lambda device=None: chip.name,
            "get_device_properties": lambda device=None: properties(chip),
            "is_current_stream_capturing": lambda: False, "is_bf16_supported": lambda *a, **k: True,
            "current_stream": lambda device=None: Stream(), "default_stream": lambda device=None: Stream(),
            "Stream": Stream, "Event": Event, "device": lambda device=None: nullcontext(),
            "stream": lambda stream=None: nullcontext(), "device_of": lambda tensor=None: nullcontext(),
            "manual_seed": lambda seed: None, "manual_seed_all": lambda seed: None, "_lazy_init": lambda: None,
            "CUDAGraph": absent, "graph": absent, "make_graphed_callables": absent, "graph_pool_handle": absent,
        }  # fmt: skip
        for name, answer in answers.items():
            setattr(cuda, name, answer)
        torch._C._cuda_getCurrentRawStream = lambda device=0: 0
        if torch.version.cuda is None:
            torch.version.cuda = "13.0"
        vars(torch)["compile"] = compiler(torch, refuse)
        by_capsules(torch)
        mode_of(torch, refuse).__enter__()

    return change


GRAPHS = "torch.cuda's graphs are not emulated: kernels run when they are launched; call the function itself"


def fail(refuse: Refuse, sentence: str, *_: Any, **__: Any) -> NoReturn:
    refuse(sentence)
    raise NotImplementedError(sentence)


def compiler(torch: ModuleType, refuse: Refuse) -> Callable[..., Any]:
    """What stands for torch.compile: with backend="eager", which compiles nothing, the function itself; with any other
    a function that refuses when it is called. A module is refused here."""

    def compile(model: Any = None, *, backend: Any = "inductor", **options: Any) -> Any:
        if model is None:
            return partial(compile, backend=backend, **options)
        if backend == "eager" or options.get("disable"):
            return model
        sentence = f'torch.compile with backend={backend!r} is not emulated; backend="eager" runs the same function'
        if isinstance(model, torch.nn.Module):
            fail(refuse, sentence)
        return wraps(model)(partial(fail, refuse, sentence))

    return compile


def properties(chip: Chip) -> SimpleNamespace:
    major, minor = chip.capability
    return SimpleNamespace(
        name=chip.name, major=major, minor=minor, total_memory=chip.memory, multi_processor_count=chip.num_sms,
        shared_memory_per_block_optin=227 << 10, shared_memory_per_multiprocessor=228 << 10, warp_size=32,
        regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, L2_cache_size=60 << 20,
    )  # fmt: skip


class Stream:
    """A stream: calls are done in order, whichever it is."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def synchronize(self) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> Event:
        return event or Event()

    def query(self) -> bool:
        return True


class Event:
    """An event on the device's time."""

    device: DeviceTime  # of the program

    def __init__(self, enable_timing: bool = False, *_: Any, **__: Any) -> None:
        self.at, self.timing = 0.0, enable_timing

    def record(self, stream: Any = None) -> None:
        self.at = self.device.record() if self.timing else self.device.ns / 1e6

    def synchronize(self) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return self.device.between(self.at, end.at)


def mode_of(torch: ModuleType, refuse: Refuse) -> Any:
    """The mode of torch functions under which "cuda" is the CPU."""
    from torch.overrides import TorchFunctionMode

    tensor = torch.Tensor
    getters = {
        tensor.is_cuda.__get__: lambda t: True, tensor.is_cpu.__get__: lambda t: False,
        tensor.device.__get__: lambda t: torch.device("cuda", 0), tensor.get_device: lambda t: 0,
        tensor.__dlpack_device__: lambda t: (CUDA, 0),
    }  # fmt: skip
    home = (tensor.cpu, tensor.numpy, tensor.tolist, tensor.item)
    same = (tensor.cuda, tensor.pin_memory)

    def marked(value: Any) -> bool:
        if isinstance(value, tensor):
            return MARK in value.__dict__
        return isinstance(value, list | tuple) and any(marked(v) for v in value)

    def mark(value: Any) -> Any:
        if isinstance(value, tensor):
            value.__dict__[MARK] = True
        elif isinstance(value, list | tuple):
            for each in value:
                mark(each)
        return value

    made_parameter = torch.nn.Parameter.__new__

    def new_parameter(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        """A parameter of a tensor on the GPU is there too; the mode does not see it made."""
        made = made_parameter(cls, data, requires_grad)
        return mark(made) if marked(data) else made

    torch.nn.Parameter.__new__ = new_parameter

    class OnTheCpu(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            on_gpu = marked(args) or marked(tuple(kwargs.values()))
            if func is tensor.__dlpack__ and on_gpu:
                return told_cuda(func(args[0], **{k: v for k, v in kwargs.items() if k == "max_version"}))
            if func in getters and on_gpu:
                return getters[func](args[0])
            if func in same:
                if func is tensor.pin_memory or on_gpu:
                    return args[0]
                return mark(args[0].clone())
            if func is tensor.cpu or (func is tensor.to and on_gpu and names_cpu((*args[1:], *kwargs.values()))):
                rest = [] if func is tensor.cpu else args[1:]
                made = args[0].clone() if on_gpu else args[0]
                made.__dict__.pop(MARK, None)
                return made.to(*rest, **kwargs) if func is tensor.to else made
            if func is torch.device:
                return func(*args, **kwargs)
            moved = [is_gpu(v) for v in (*args, *kwargs.values()) if not isinstance(v, tensor)]
            cpu = torch.device("cpu")
            args = tuple(cpu if is_gpu(v) and not isinstance(v, tensor) else v for v in args)
            kwargs = {k: cpu if is_gpu(v) and not isinstance(v, tensor) else v for k, v in kwargs.items()}
            if on_gpu:
                args, kwargs = cast(torch, func, args, kwargs, refuse)
            made = func(*args, **kwargs)
            if func is tensor.to and any(moved) and not on_gpu and made is args[0]:
                made = made.clone()
            if func == tensor.data.__set__:  # as nn.Module.to does
                args[0].__dict__.pop(MARK, None)
                return mark(args[0]) if marked(args[1]) else None
            if len(args) > 0 and made is args[0]:  # in place
                return made
            on_cpu = names_cpu(tuple(kwargs.values())) and not any(moved)
            return mark(made) if (any(moved) or (on_gpu and not on_cpu)) and func not in home else made

    def names_cpu(values: tuple[Any, ...]) -> bool:
        return any(str(v) == "cpu" for v in values if isinstance(v, str | torch.device))

    return OnTheCpu()
