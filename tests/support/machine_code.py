"""Reads the compiler's log of a kernel, and the kernel's SASS."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from pathlib import Path

import pytest

from padless.runtime.jit import CompiledKernel

SHARED_LIMIT = 232_448  # bytes a CTA of compute capability 9.0 and 10.0 can have (227 KiB)
REGISTER_FILE = 65_536  # registers of a multiprocessor


def complaints(kernel: CompiledKernel) -> list[str]:
    """What is wrong with a kernel as the compiler describes it."""
    found = []
    if kernel.spill_bytes:
        found.append(f"{kernel.spill_bytes} bytes spilled")
    if kernel.stack_bytes:
        found.append(f"{kernel.stack_bytes} bytes of stack")
    if not 0 < kernel.registers <= 255:
        found.append(f"{kernel.registers} registers")
    if kernel.registers * kernel.num_threads > REGISTER_FILE:
        found.append(f"{kernel.registers} registers x {kernel.num_threads} threads do not fit")
    if not 0 < kernel.shared_bytes <= SHARED_LIMIT:
        found.append(f"{kernel.shared_bytes} bytes of shared memory")
    if kernel.num_stages < 2:
        found.append(f"{kernel.num_stages} stages")
    # Whatever ptxas numbers is unwelcome. C7510 and C7511: products serialised; C7508: setmaxnreg ignored;
    # C7517 and C7519: a wait or a fence put in where one was missing.
    found += [line for line in kernel.log.splitlines() if re.search(r"warning|error|\(C\d{4}\)", line)]
    return found


def cuobjdump() -> Path:
    """The disassembler of the nvidia-cuda-cuobjdump package; nvdisasm has to lie beside it."""
    spec = importlib.util.find_spec("nvidia")
    for location in spec.submodule_search_locations or [] if spec else []:
        tool = Path(location) / "cu13" / "bin" / "cuobjdump"
        if tool.exists() and (tool.parent / "nvdisasm").exists():
            return tool
    pytest.skip("needs the nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm packages (the dev extra)")


def instructions(kernel: CompiledKernel, folder: Path) -> list[str]:
    """The kernel's SASS, one "OPCODE operands" a line, without predicates, addresses and encodings."""
    tool = cuobjdump()
    image = folder / "kernel.cubin"
    image.write_bytes(kernel.image)
    path = f"{tool.parent}{os.pathsep}{os.environ.get('PATH', '')}"
    done = subprocess.run([str(tool), "-sass", str(image)], capture_output=True, env={**os.environ, "PATH": path})
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    text = done.stdout.decode(errors="replace")
    return re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][^;]*?)\s*;", text)


def moves_a_product(sass: list[str]) -> float:
    """R2UR, moves into uniform registers, for each wgmma, between the first wgmma and the last.

    A wgmma takes its descriptors from uniform registers. Where the compiler has their base in a vector register it
    computes each descriptor there, and moves all four words for every wgmma.
    """
    products = [i for i, line in enumerate(sass) if re.match(r"[A-Z]GMMA\b", line)]
    return sum(line.startswith("R2UR") for line in sass[products[0] : products[-1]]) / len(products)
