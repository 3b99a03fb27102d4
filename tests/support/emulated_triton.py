"""A Triton kernel compiled to PTX and run in the emulator, in the place of its launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from padless.emulator import Emulator

triton = pytest.importorskip("triton")

POINTEES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
}

# What Triton does by itself and is harmless: threads that hold copies of a value all store it to the same
# place in shared memory, and LLVM leaves a register unset that no one looks at.
COMPILERS_OWN = {"race", "uninitialised-register"}


class EmulatedKernel:
    """Stands in for a @triton.jit function: kernel[grid](...) compiles for sm_90 and runs in the emulator."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self._compiled: dict[tuple, Any] = {}
        self.launches = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **options: self._launch(grid, args, options)

    def _launch(self, grid: tuple[int, ...], args: tuple, options: dict[str, Any]) -> None:
        num_warps = options.pop("num_warps")
        programmatic = options.pop("launch_pdl", False)
        options.pop("maxnreg", None)  # which says nothing to the compiler of PTX
        compiled_with = {"num_warps": num_warps}
        if "enable_fp_fusion" in options:
            compiled_with["enable_fp_fusion"] = options.pop("enable_fp_fusion")
        names = self._function.arg_names
        constants = {**{name: a for name, a in zip(names, args, strict=False) if a is None}, **options}
        runtime = {name: a for name, a in zip(names, args, strict=False) if a is not None}
        self._run(self._compile(runtime, constants, compiled_with), grid, list(runtime.values()), programmatic)
        self.launches += 1

    def _run(self, kernel: Any, grid: tuple[int, ...], arguments: list[Any], programmatic: bool) -> None:
        emulator = Emulator(kernel.asm["ptx"], name=f"{kernel.name}.ptx")
        values = [self._value(emulator, a) for a in arguments]
        missing = len(emulator.program(kernel.name).function.parameters) - len(values)
        result = emulator.launch(
            kernel.name, grid, 32 * kernel.metadata.num_warps, values + [0] * missing,
            shared_bytes=kernel.metadata.shared, programmatic=programmatic,
        )  # fmt: skip
        serious = [report for report in result.reports if report.kind not in COMPILERS_OWN]
        assert not serious, serious

    def _compile(self, runtime: dict[str, Any], constants: dict[str, Any], options: dict[str, int]) -> Any:
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        names = self._function.arg_names
        types = {
            name: f"*{POINTEES[a.dtype]}" if isinstance(a, torch.Tensor) else "fp32" if isinstance(a, float) else "i32"
            for name, a in runtime.items()
        }
        aligned = [
            name
            for name, a in runtime.items()
            if not isinstance(a, float) and (a.data_ptr() if isinstance(a, torch.Tensor) else a) % 16 == 0
        ]
        key = (tuple(types.items()), tuple(aligned), tuple(constants.items()), tuple(options.items()))
        if key not in self._compiled:
            source = ASTSource(
                self._function,
                signature={name: types.get(name, "constexpr") for name in names},
                constexprs={(names.index(name),): value for name, value in constants.items()},
                attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
            )
            target = GPUTarget("cuda", 90, 32)
            self._compiled[key] = triton.compile(source, target=target, options=options)
        return self._compiled[key]

    @staticmethod
    def _value(emulator: Emulator, argument: Any) -> int | float:
        """A number, or the address of a tensor's first element with all of its storage behind it."""
        if not isinstance(argument, torch.Tensor):
            return argument
        storage = torch.empty(0, dtype=torch.uint8).set_(argument.untyped_storage())
        return emulator.memory.register(storage.numpy()) + argument.data_ptr() - storage.data_ptr()
