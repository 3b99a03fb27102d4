"""Description of the machine of a result: GPU, driver, clocks, versions. Only reads; never changes a setting of the
GPU.
"""

from __future__ import annotations

import datetime
import importlib
import platform
import shutil
import subprocess
from typing import Any

import torch

from padless._version import __version__, package_version
from padless.runtime.jit import source_digests

PACKAGES = ("torch", "triton", "numpy", "cuda-bindings", "nvidia-cuda-nvrtc")
_QUERY = {
    "name": "gpu",
    "driver_version": "driver",
    "clocks.max.sm": "max_sm_mhz",
    "clocks.max.mem": "max_mem_mhz",
    "power.limit": "power_limit_w",
}
_STATE = {"clocks.sm": "sm_mhz", "clocks.mem": "mem_mhz", "power.draw": "power_w", "temperature.gpu": "temperature_c"}


def require_gpu(what: str) -> None:
    """ValueError where there is no CUDA GPU to measure on."""
    if not torch.cuda.is_available():
        raise ValueError(f"{what} needs a CUDA GPU, and torch sees none on this machine")


def packages() -> dict[str, str | None]:
    """Versions of what is computed with; None for what is not installed."""
    return {name: package_version(name) for name in PACKAGES}


def devices() -> list[dict[str, Any]]:
    """The GPUs that torch sees."""
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        about = {"index": index, "name": properties.name}
        about["capability"] = f"{properties.major}.{properties.minor}"
        about |= {"multiprocessors": properties.multi_processor_count, "memory_bytes": properties.total_memory}
        found.append(about)
    return found


def describe() -> dict[str, Any]:
    """Date, host software, hashes of the kernels' sources and GPU of a run, for its result file."""
    facts: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "versions": {name: version for name, version in packages().items() if version is not None}
        | {"padless": __version__},
        "kernels": source_digests(),
    }
    if torch.cuda.is_available():
        gpu = devices()[torch.cuda.current_device()]
        facts |= {
            "gpu": gpu["name"],
            "capability": gpu["capability"],
            "sms": gpu["multiprocessors"],
            "memory_gib": round(gpu["memory_bytes"] / 2**30, 1),
        }
    return facts | nvidia_smi(_QUERY)


def clocks() -> dict[str, Any]:
    """Clocks (MHz), power (W) and temperature (degrees C) now; empty where they cannot be read."""
    try:
        return _nvml_clocks()
    except Exception:  # no NVML binding, or one that disagrees with the driver: nvidia-smi is slower but always there
        return nvidia_smi(_STATE)


def _nvml_clocks() -> dict[str, Any]:
    pynvml = importlib.import_module("pynvml")
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}".encode())
    return {
        "sm_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
        "mem_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),
        "power_w": round(pynvml.nvmlDeviceGetPowerUsage(handle) / 1000, 1),
        "temperature_c": pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
    }


def nvidia_smi(query: dict[str, str]) -> dict[str, Any]:
    """Fields of `nvidia-smi --query-gpu` under the names that `query` maps them to; empty where it cannot run."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    index = torch.cuda.current_device() if torch.cuda.is_available() else 0
    command = [program, f"--id={index}", f"--query-gpu={','.join(query)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    return parse_smi_line(done.stdout.splitlines()[0] if done.stdout else "", list(query.values()))


def parse_smi_line(line: str, names: list[str]) -> dict[str, Any]:
    """One CSV line of nvidia-smi as {name: number or text}; unknown fields ("[N/A]") are left out."""
    fields = [field.strip() for field in line.split(",")]
    if len(fields) != len(names):
        return {}
    return {name: _number(field) for name, field in zip(names, fields, strict=True) if "N/A" not in field}


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:  # a name, or a driver's version
        return text
