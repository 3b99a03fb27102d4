"""Reads the compiler's log of a kernel, and the kernel's SASS."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from pathlib import Path

import pytest

from padless.runtime import jit
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


def hopper_complaints(sass: list[str], kernel: CompiledKernel, consumers: int = 232, producer: int = 40) -> list[str]:
    """What is wrong with a persistent kernel of 256 consumers and 128 producers, which have so many registers a thread.

    Local memory, atomics beside the tile counter's, and registers that the CTA does not have.
    """
    opcodes = {line.split()[0] for line in sass}
    found = [f"{o} (local memory)" for o in opcodes if re.match(r"(LDL|STL)\b", o)]
    found += [f"{o} (atomic)" for o in opcodes if re.match(r"(ATOMG|RED)\b", o) and o != "ATOMG.E.ADD.STRONG.GPU"]
    asked = {int(line.split(",")[-1], 16) for line in sass if line.startswith("USETMAXREG.TRY_ALLOC")}
    kept = {int(line.split()[-1], 16) for line in sass if line.startswith("USETMAXREG.DEALLOC")}
    pool = kernel.registers * kernel.num_threads
    if (asked, kept) != ({consumers}, {producer}) or pool < 256 * consumers + 128 * producer:
        found.append(f"setmaxnreg asks for {asked} and keeps {kept} of {kernel.registers}")
    return found


def products(sass: list[str]) -> list[str]:
    """Products of the tensor core, but for the empty ones: those of groups committed where control flow has met."""
    empty = "HGMMA.64x8x16.F16 RZ, gdesc[URZ], RZ, !UPT, gsb0"
    return [line for line in sass if re.match(r"(QGMMA|HGMMA|IGMMA|HMMA)", line) and line != empty]


def edit_sources(monkeypatch: pytest.MonkeyPatch, where: str | tuple[str, ...], pattern: str, replacement: str) -> int:
    """Replaces a pattern in what is compiled from here on; gives how often it was there. where: beginnings of files."""
    sources, count = dict(jit.sources()), 0
    for name in [name for name in sources if name.startswith(where)]:
        sources[name], found = re.subn(pattern, replacement, sources[name])
        count += found
    assert count > 0, f"{where} has nothing like {pattern!r} any more: plant another fault"
    monkeypatch.setattr(jit, "sources", lambda: sources)
    return count


def moves_a_product(sass: list[str]) -> float:
    """R2UR, moves into uniform registers, for each wgmma, between the first wgmma and the last.

    A wgmma takes its descriptors from uniform registers. Where the compiler has their base in a vector register it
    computes each descriptor there, and moves all four words for every wgmma.
    """
    products = [i for i, line in enumerate(sass) if re.match(r"[A-Z]GMMA\b", line)]
    return sum(line.startswith("R2UR") for line in sass[products[0] : products[-1]]) / len(products)
