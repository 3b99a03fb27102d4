"""Digests of generated machine-independent code: which kernels a refactoring changed.

    python tools/kernel_digests.py            compares with tests/kernels/digests.json
    python tools/kernel_digests.py --write    writes it anew, after a change of device code that was meant

The kernels are those that the calls of ``padless verify`` ask for, at most ``PER_KERNEL`` of each kernel and
architecture, chosen by the hash of their constants. A digest is the sha256 of the PTX without debug lines and with one
name for all entries, so moving a file or renaming an entry or a constant changes no digest.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

FILE = Path(__file__).parents[1] / "tests" / "kernels" / "digests.json"
PER_KERNEL = 10
GPUS = (("sm_90a", 132), ("sm_100a", 148))
# A constexpr at file scope; what the host reads back (padless_..) counts.
_CONSTANT = re.compile(r"\.global \.align \d+ \.[usf]\d+ (?!padless_)\w+( = [-\w]+)?;")
Asked = tuple[str, str, str]  # kernel file's stem, constants, architecture


def asked_for() -> set[Asked]:
    """Kernels that the calls of ``padless verify`` compile on each of ``GPUS``."""
    from padless.testing.compile_ahead import Gpu, kernels_of
    from padless.verify.checks import rehearsals_of
    from padless.verify.run import jobs_of

    found: set[Asked] = set()
    for arch, num_sms in GPUS:
        jobs, modules = jobs_of(arch, None, True)
        kernels, problems = kernels_of(rehearsals_of(arch, jobs.values(), modules), Gpu(arch, num_sms))
        if problems:
            raise RuntimeError("; ".join(problems))
        found |= {(Path(kernel.source).stem, kernel.prelude, kernel.arch) for kernel in kernels}
    return found


def chosen(kernels: Iterable[Asked]) -> list[Asked]:
    """At most ``PER_KERNEL`` of each kernel and architecture, half of them quantizing where there are such."""
    groups: dict[tuple[str, str, bool], list[Asked]] = {}
    for kernel in sorted(kernels, key=name_of):
        quantizing = "EPILOGUE_IS_QUANT 1" in kernel[1]
        groups.setdefault((kernel[0], kernel[2], quantizing), []).append(kernel)
    return [kernel for group in groups.values() for kernel in group[:PER_KERNEL]]


def name_of(kernel: Asked) -> str:
    """Kernel, architecture and the start of the hash of the constants."""
    stem, prelude, arch = kernel
    return f"{stem}-{arch}-{hashlib.sha256(prelude.encode()).hexdigest()[:12]}"


def digest(kernel: Asked) -> str:
    """sha256 of the kernel's PTX, normalised."""
    from padless.runtime import jit

    stem, prelude, arch = kernel
    (source,) = (name for name in jit.sources() if Path(name).name == f"{stem}.cu")
    return hashlib.sha256(normalised(jit.compile_kernel(source, prelude, arch, "ptx")).encode()).hexdigest()


def normalised(kernel: object) -> str:
    """PTX without comments, debug sections, the entry's own name, and the source's constants, which instructions hold as
    numbers.
    """
    text: str = kernel.image.decode().rstrip("\0")  # type: ignore[attr-defined]
    text = text.split("\n.section")[0].split("\n\t.section")[0]
    text = text.replace(kernel.entry, "ENTRY")  # type: ignore[attr-defined]  # parameters are named after it too
    lines = (line.split("//")[0].rstrip() for line in text.splitlines())
    kept = (line for line in lines if line and not line.lstrip().startswith((".file", ".loc")))
    return "\n".join(line for line in kept if not _CONSTANT.fullmatch(line))


def recorded() -> dict[Asked, str]:
    """The kernels of ``FILE`` with their digests."""
    found = {}
    for name, entry in json.loads(FILE.read_text()).items():
        stem, arch, _ = name.split("-")
        found[stem, entry["constants"], arch] = entry["digest"]
    return found


def sample(kernels: Iterable[Asked]) -> list[Asked]:
    """One of each kernel, with and without a quantizing epilogue: with the fewest constants, first by name."""
    groups: dict[tuple[str, bool], list[Asked]] = {}
    for kernel in sorted(kernels, key=lambda kernel: (len(kernel[1].splitlines()), name_of(kernel))):
        groups.setdefault((kernel[0], "EPILOGUE_IS_QUANT 1" in kernel[1]), []).append(kernel)
    return [group[0] for group in groups.values()]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--write", action="store_true", help="write the file anew")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args(argv)
    kernels = chosen(asked_for())
    with ProcessPoolExecutor(arguments.workers) as pool:
        now = {
            name_of(kernel): {"digest": found, "constants": kernel[1]}
            for kernel, found in zip(kernels, pool.map(digest, kernels), strict=True)
        }
    if arguments.write:
        FILE.write_text(json.dumps(now, indent=1) + "\n")
        print(f"{len(now)} digests in {FILE}")
        return 0
    before = json.loads(FILE.read_text())
    changed = [name for name, entry in now.items() if before.get(name, entry)["digest"] != entry["digest"]]
    print("\n".join([f"changed: {name}" for name in changed]))
    print("\n".join(f"no longer asked for: {name}" for name in sorted(before.keys() - now.keys())))
    print("\n".join(f"asked for since: {name}" for name in sorted(now.keys() - before.keys())))
    print(f"{len(now)} kernels, {len(changed)} changed")
    return 1 if changed or before.keys() != now.keys() else 0


if __name__ == "__main__":
    sys.exit(main())
