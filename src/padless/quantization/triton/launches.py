"""Launches of Triton kernels: without Triton's search for the compiled one, and begun before the kernel ahead has ended.

The search takes the host longer than the launch, and Triton's own launcher half as long again.
A compiled kernel depends on the constants and options of the call, on the dtypes of tensors, on which addresses and
numbers are multiples of 16, and on which numbers are 1 or need 64 bits. These are compared at every call, and nothing
else is kept: no tensor and no address. It is launched as padless's own kernels are, by `padless.runtime.driver`; one
that padless-cubins has is not even compiled.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import ctypes
import os
from functools import lru_cache, partial
from typing import Any

import torch
import triton
import triton.language as tl
from triton.compiler import CompiledKernel
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime.jit import JITFunction

from padless.kernels.remembered import keep
from padless.quantization.triton.compiled import Compiled, Description, shipped_kernel
from padless.runtime.driver import is_made

_MOST = 4096
_KNOWN: dict[tuple[Any, ...], Any] = {}  # compiled kernels, to be called with a number of programs and arguments
_SPECIALIZED: dict[int, tuple[Any, tuple[bool, ...]]] = {}  # by id, with the kernel, so that no other one takes it


def launch(kernel: Any, programs: int) -> Any:
    """kernel[(programs,)], to be called with arguments and options: launches on the current device and stream.

    kernel: a @triton.jit function; what stands in for one is called as it is.
    arguments: its first parameters, a tensor and then tensors, numbers and None.
    options: its other parameters, all of them constants, and options of the compiler.
    """
    return partial(_launch, kernel, programs) if type(kernel) is JITFunction else kernel[(programs,)]


def _launch(kernel: Any, programs: int, *arguments: Any, **options: Any) -> None:
    index = arguments[0].get_device()
    facts = _facts(kernel, arguments)
    key = (id(kernel), index, *options, *options.values(), *facts)
    known = _KNOWN.get(key)
    if known is None and (known := shipped_kernel(kernel, index, facts, options)) is not None:
        keep(_KNOWN, _MOST, key, known)
    if known is not None:
        known(programs, arguments)
    elif is_made(None):
        compiled = kernel[(programs,)](*arguments, **options)
        if type(compiled) is CompiledKernel:
            constants = tuple(options[name] for name in kernel.arg_names[len(arguments) :])
            said = Description.of(compiled, len(arguments))
            ours = None if said is None else Compiled(said, ctypes.c_void_p(compiled.function), index)
            keep(_KNOWN, _MOST, key, ours or partial(_by_triton, compiled, constants))


def _by_triton(compiled: Any, constants: tuple[Any, ...], programs: int, arguments: tuple[Any, ...]) -> None:
    if is_made(None):
        compiled[(programs, 1, 1)](*arguments, *constants)


def _facts(kernel: Any, arguments: tuple[Any, ...]) -> list[Any]:
    """The facts of each argument that a compiled kernel depends on."""
    known = _SPECIALIZED.get(id(kernel))
    if known is None:
        known = (kernel, tuple(not p.do_not_specialize for p in kernel.params))
        _SPECIALIZED[id(kernel)] = known
    facts: list[Any] = []
    for argument, is_specialized in zip(arguments, known[1], strict=False):
        kind = type(argument)
        if kind is int:
            is_wide = not -(1 << 31) <= argument < 1 << 31
            facts.append((is_wide, argument == 1, argument % 16 == 0) if is_specialized else is_wide)
        elif isinstance(argument, torch.Tensor):
            facts.append((argument.dtype, argument.data_ptr() % 16 == 0))
        else:
            facts.append(kind)
    return facts


# --- programmatic dependent launch -----------------------------------------------------------------------


@lru_cache(maxsize=64)
def is_programmatic(device: torch.device) -> bool:
    """Whether launches may begin before the kernel ahead has ended: from Hopper on, unless the environment says no."""
    if device.type != "cuda" or os.environ.get("PADLESS_PROGRAMMATIC_LAUNCH", "1") == "0":
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def programmatic(device: torch.device, *, early: bool = True, releases: bool = True) -> dict[str, int]:
    """Options of a launch of a kernel that calls `begin(PROGRAMMATIC)` first of all.

    early: whether it begins before the kernel ahead has ended. Behind a product it should not: what waits there takes
    more from the product than it gains (3 us of 108, where it was measured on an H200).
    releases: whether the next kernel may begin before this one has ended. A large product should not: its programs are
    then spread over the GPU in another order (0.6% of 4.6 ms).
    """
    if not is_programmatic(device):
        return {"PROGRAMMATIC": 0}
    return {"PROGRAMMATIC": 2 if releases else 1} | ({"launch_pdl": True} if early else {})


@triton.jit
def wait(PROGRAMMATIC: tl.constexpr):
    """Waits until the kernels ahead have ended."""
    if PROGRAMMATIC > 0:
        gdc_wait()


@triton.jit
def release(PROGRAMMATIC: tl.constexpr):
    """With 2 the next kernel may begin when all programs have come here."""
    if PROGRAMMATIC > 1:
        gdc_launch_dependents()


@triton.jit
def begin(PROGRAMMATIC: tl.constexpr):
    """`wait` and then `release`."""
    wait(PROGRAMMATIC)
    release(PROGRAMMATIC)
