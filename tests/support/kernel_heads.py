"""Shared memory of kernels, of which the head alone is compiled: constants and storage, in a fraction of a second."""

from __future__ import annotations

from typing import NamedTuple

from padless.kernels.launch import KernelConfig
from padless.runtime import jit


class Head(NamedTuple):
    """What a kernel's head says: bytes of shared memory of a CTA, stages."""

    shared_bytes: int
    stages: int


def head_of(source: str, config: KernelConfig, arch: str = "sm_90a") -> Head | None:
    """The head of ``kernels/<source>``; None where it does not fit."""
    text = jit.sources()[source].split('extern "C" __global__')[0]
    dummy = 'extern "C" __global__ void padless_head() {}\n'
    try:
        image, _ = jit._run_nvrtc(jit._front(source, config.prelude()) + text + dummy, source, arch, "ptx")
    except jit.CompileError as error:
        if "does not fit in shared memory" not in str(error):
            raise
        return None
    read = [jit._constant(image, "ptx", f"padless_{name}") for name in ("shared_bytes", "num_stages")]
    return Head(*read)
