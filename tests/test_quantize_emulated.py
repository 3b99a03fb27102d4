"""The quantisers' own machine code, compiled for Hopper by Triton and executed in the emulator, against
torch.

Triton's interpreter shows that the kernels say the right thing; this shows that what the compiler makes of
them does
it: the conversion instructions, the division, NaN and subnormals, the packing of FP4, 16-byte accesses and
    masks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton_cases

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

# The others take up to half a minute each.
QUICK = {"fp8_block_code_boundaries", "fp8_block_amax_floor", "fp8_block_strides", "mx_code_boundaries"}


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
        options.pop("maxnreg", None)  # which says nothing to the compiler of PTX
        compiled_with = {"num_warps": num_warps}
        if "enable_fp_fusion" in options:
            compiled_with["enable_fp_fusion"] = options.pop("enable_fp_fusion")
        names = self._function.arg_names
        constants = {**{name: a for name, a in zip(names, args, strict=False) if a is None}, **options}
        runtime = {name: a for name, a in zip(names, args, strict=False) if a is not None}
        kernel = self._compile(runtime, constants, compiled_with)
        emulator = Emulator(kernel.asm["ptx"], name=f"{kernel.name}.ptx")
        values = [self._value(emulator, a) for a in runtime.values()]
        missing = len(emulator.program(kernel.name).function.parameters) - len(values)
        result = emulator.launch(
            kernel.name, grid, 32 * num_warps, values + [0] * missing, shared_bytes=kernel.metadata.shared
        )
        serious = [report for report in result.reports if report.kind not in COMPILERS_OWN]
        assert not serious, serious
        self.launches += 1

    def _compile(self, runtime: dict[str, Any], constants: dict[str, Any], options: dict[str, int]) -> Any:
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        names = self._function.arg_names
        types = {
            name: f"*{POINTEES[a.dtype]}"
            if isinstance(a, torch.Tensor)
            else "fp32"
            if isinstance(a, float)
            else "i32"
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


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> list[EmulatedKernel]:
    """Every quantiser kernel replaced by its emulated machine code, with the hardware's casts."""
    from padless import quantize_triton, quantize_triton_global, quantize_triton_rows, triton_casts

    monkeypatch.setattr(triton_casts, "casts_in_hardware", lambda device: True)
    kernels = []
    for module, name in (
        (quantize_triton, "_fp8_block_activation"),
        (quantize_triton, "_fp8_block_weight"),
        (quantize_triton_rows, "_row_blocks"),
        (quantize_triton_global, "_chunk_amax"),
        (quantize_triton_global, "_derive"),
        (quantize_triton_global, "_factors_of_given"),
    ):
        kernels.append(EmulatedKernel(getattr(module, name)))
        monkeypatch.setattr(module, name, kernels[-1])
    return kernels


@pytest.fixture
def positive_nans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs whose NaN have no sign: a GPU's float32 arithmetic returns one NaN, 0x7FFFFFFF, whatever went
    in, and the
    emulator's keeps the sign of an operand, which then shows in the FP4 codes of a broken block."""
    original = triton_cases.awkward

    def awkward(*args: Any) -> torch.Tensor:
        x = original(*args)
        return x.masked_fill(x.isnan(), float("nan"))

    monkeypatch.setattr(triton_cases, "awkward", awkward)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in triton_cases.CASES],
)
@pytest.mark.usefixtures("positive_nans")
def test_machine_code(name: str, emulated: list[EmulatedKernel]) -> None:
    triton_cases.CASES[name]("cpu")
    assert sum(k.launches for k in emulated) > 0


@pytest.mark.parametrize("name", triton_cases.ROW_FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.usefixtures("positive_nans")
def test_a_few_rows(name: str, dtype: torch.dtype, emulated: list[EmulatedKernel]) -> None:
    x = triton_cases.awkward((21, 144), dtype, 5)
    for rule in triton_cases.rules(name):
        triton_cases.row_blocks_pair(x, name, rule, "cpu")
    assert sum(k.launches for k in emulated) == (6 if name == "NVFP4" else 2)
