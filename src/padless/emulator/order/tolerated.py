"""What NVIDIA's own kernels do against the ISA, on chips that run them right."""

from __future__ import annotations

from padless.emulator.ptx.ast import Instruction

TOLERATED = "tolerated"


def tolerance(kind: str, instruction: Instruction | None, other: Instruction | None) -> str:
    """What the ISA says, of a finding that NVIDIA's own kernels give rise to on chips that run them right; else ""."""
    if kind == "mbarrier-init" and instruction is not None:
        if "init" in instruction.modifiers:
            return "memory that holds an mbarrier is made another by mbarrier.inval alone (PTX ISA, mbarrier.inval)"
        return "mbarrier.init is ordered before the async proxy by a fence alone (PTX ISA, async proxy)"
    if kind == "race-equal":
        return "two stores that nothing orders are a data race whatever they store (PTX ISA, memory consistency model)"
    if kind == "exit-covered":
        return (
            "shared memory of a CTA lives as long as the CTA does (PTX ISA, shared state space), and the order of two "
            "arrivals of tcgen05.commit is not given; a later one of the same pipe has been waited for"
        )
    if kind == "descriptor-start":
        return "an operand that begins off its swizzle's repeating pattern needs the base offset (PTX ISA, descriptors)"
    if kind == "launch-control-refused":
        return "get_first_ctaid of a request that failed is undefined (PTX ISA, clusterlaunchcontrol.query_cancel)"
    if kind == "unread-load":
        return "accesses of the same bytes through two proxies are ordered by a proxy fence alone (PTX ISA, proxies)"
    if kind == "missing-wgmma-fence":
        return (
            "registers are ordered before wgmma.mma_async by wgmma.fence alone (PTX ISA, wgmma.fence); ptxas puts a "
            "missing one in and says so (C7519)"
        )
    allocates = other is not None and other.opcode == "tcgen05" and "alloc" in other.modifiers
    if kind == "missing-proxy-fence" and allocates:
        return (
            "the address that tcgen05.alloc writes is ordered before the async proxy by a proxy fence alone (PTX ISA, "
            "proxies); tcgen05.alloc blocks until it has it"
        )
    if kind == "tensor-memory" and instruction is not None and "commit" in instruction.modifiers:
        return "a commit tracks what its own thread has issued (PTX ISA, tcgen05.commit): with nothing, it arrives"
    loaded = other is not None and other.opcode == "tcgen05" and "ld" in other.modifiers
    if kind == "missing-tcgen05-fence":
        return (
            "accesses of different threads are ordered by tcgen05.fence::before_thread_sync, a barrier and "
            "tcgen05.fence::after_thread_sync (PTX ISA, tcgen05 memory consistency)"
        )
    if kind == "register-in-flight" and loaded:
        return "tcgen05.ld is asynchronous, tcgen05.wait::ld waits for it (PTX ISA, tcgen05.ld)"
    frees = instruction is not None and instruction.opcode == "tcgen05" and "dealloc" in instruction.modifiers
    if kind == "race" and loaded and frees:
        return "all uses have to be over before tcgen05.dealloc, a tcgen05.ld by its wait (PTX ISA, tcgen05.dealloc)"
    return ""
