"""Run PTX on the CPU: a SIMT emulator with asynchronous copies and tensor cores, and a race detector.

emulator = Emulator(ptx, seed=3)
a = emulator.memory.register(numpy_array)
result = emulator.launch("kernel", grid=(2, 1, 1), block=(128, 1, 1), args=[a, 7], shared_bytes=4096)
for report in result.reports: print(report)
"""

from __future__ import annotations

from padless.emulator.emulator import Emulator, LaunchResult
from padless.emulator.errors import EmulatorError, KernelFault, LaunchError, PtxSyntaxError, UnsupportedInstruction
from padless.emulator.order.reports import KINDS, Report
from padless.emulator.state.launch import Statistics
from padless.emulator.state.memory import DeviceMemory
from padless.emulator.state.schedule import Schedule

__all__ = [
    "KINDS",
    "DeviceMemory",
    "Emulator",
    "EmulatorError",
    "KernelFault",
    "LaunchError",
    "LaunchResult",
    "PtxSyntaxError",
    "Report",
    "Schedule",
    "Statistics",
    "UnsupportedInstruction",
]
