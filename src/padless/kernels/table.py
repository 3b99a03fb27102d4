"""Table of what runs where: for every operation, architecture and pair of formats, the kernel that does it.

A route is a row of ``ROUTES``. Its module, in its kernel's folder, is the host side of its kernel: a ``KernelHost``,
or a ``QuantHost`` for the quantizing call. docs/supported.md is generated from this table.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

from padless.kernels.config import BF16 as BF16
from padless.kernels.config import format_name as format_name
from padless.kernels.sm90_bf16 import config as sm90_bf16
from padless.runtime.architecture import BLACKWELL, HOPPER
from padless.runtime.architecture import kernels_arch as kernels_arch

if TYPE_CHECKING:
    import torch

    from padless.epilogue import Epilogue, EpilogueTensors
    from padless.formats import BlockScaledTensor
    from padless.kernels.launch import KernelConfig, Prepared
    from padless.runtime.driver import Driver

QUANT = "grouped_gemm_quant"  # the operation of the quantizing calls


class Host(Protocol):
    """The host side of a kernel: a module with these names."""

    @property
    def Config(self) -> type[KernelConfig]:
        """The class of the kernel's configuration."""
        ...


class KernelHost(Host, Protocol):
    """The host side of a kernel that stores sums."""

    def prepare(
        self,
        driver: Driver,
        a: BlockScaledTensor | torch.Tensor,
        b: BlockScaledTensor,
        offs: torch.Tensor | None,
        out: torch.Tensor,
        config: KernelConfig | None,
    ) -> Prepared:
        """Packs the launch of out = a @ b of its group.

        a (M, K); b (G, N, K); offs (G,) end rows, None for one group of all rows; out (M, N). It checks what only this
        kernel needs, picks the configuration where ``config`` is None, compiles and encodes tensor maps. No
        configuration changes how a row's products are added up. Raises ValueError.
        """
        ...


class QuantHost(Host, Protocol):
    """The host side of a kernel with a quantizing epilogue."""

    def prepare(
        self,
        driver: Driver,
        a: BlockScaledTensor | torch.Tensor,
        b: BlockScaledTensor,
        offs: torch.Tensor | None,
        tensors: EpilogueTensors,
        config: KernelConfig | None,
        *,
        epilogue: Epilogue,
    ) -> Prepared:
        """Packs the launch of a @ b of its group with all that ``epilogue`` does, into ``tensors``; amax holds -inf.

        Operands as ``KernelHost.prepare`` takes them. Raises ValueError for what the kernel cannot do.
        """
        ...


@dataclass(frozen=True)
class Route:
    """One kernel for one pair of formats.

    Attributes:
        operation: "grouped_gemm", "gemm" or one of the quantizing calls, named as ``ROUTES`` does.
        arch: name of an architecture with kernels of its own (`padless.runtime.architecture`).
        a, b: names of the formats of activations and weights; ``BF16`` for a plain tensor.
        module: the host side, a key of ``_HOSTS``; verification's random problems are seeded by it.
        kernel: the device side, a file in ``kernels/``.
        accumulation: how products are added up, in a sentence.
        any_n: whether rows of the output may start anywhere, not on 16 bytes alone.
    """

    operation: str
    arch: str
    a: str
    b: str
    module: str
    kernel: str
    accumulation: str
    any_n: bool = False

    @property
    def name(self) -> str:
        """The kernel's name, as records and documentation have it: the device file's, without ".cu"."""
        return self.kernel.rpartition("/")[2].removesuffix(".cu")

    @property
    def config_class(self) -> type[KernelConfig]:
        """The class of the kernel's configuration, which tells one kernel from another."""
        return self.load().Config

    def load(self) -> KernelHost:
        """The host side of a route that stores sums."""
        return cast("KernelHost", import_module(f".{_HOSTS[self.module][0]}", __package__))

    def load_quant(self) -> QuantHost:
        """The host side of a route of the quantizing call."""
        return cast("QuantHost", import_module(f".{_HOSTS[self.module][0]}", __package__))


# The host sides, and the device files.
_HOSTS = {
    "sm90_fp8": ("sm90_fp8.host", "sm90_fp8/sm90_fp8_grouped_gemm.cu"),
    "sm90_fp8_quant": ("sm90_fp8.host_quant", "sm90_fp8/sm90_fp8_grouped_gemm.cu"),
    "sm90_bf16": ("sm90_bf16.host", "sm90_bf16/sm90_bf16_grouped_gemm.cu"),
    "sm90_bf16_quant": ("sm90_bf16.host_quant", "sm90_bf16/sm90_bf16_grouped_gemm.cu"),
    "sm90_bf16_plain": ("sm90_bf16_plain.host", "sm90_bf16_plain/sm90_bf16_plain_grouped_gemm.cu"),
    "sm90_mxfp8": ("sm90_mxfp8.host", "sm90_mxfp8/sm90_mxfp8_grouped_gemm.cu"),
    "sm90_mxfp8_quant": ("sm90_mxfp8.host_quant", "sm90_mxfp8/sm90_mxfp8_grouped_gemm.cu"),
    "sm100_grouped": ("sm100_grouped.host", "sm100_grouped/sm100_grouped_gemm.cu"),
    "sm100_grouped_quant": ("sm100_grouped.host_quant", "sm100_grouped/sm100_grouped_gemm.cu"),
    "sm100_mxfp8_dense": ("sm100_dense.host", "sm100_dense/sm100_mxfp8_gemm.cu"),
}


# Accumulations of the pairs (activations, weights) that a kernel multiplies.
_Pairs = Mapping[tuple[str, str], str]
_EIGHT_BITS = tuple((a, b) for a in ("MXFP8", "MXFP8_E5M2") for b in ("MXFP8", "MXFP8_E5M2"))
_BY_FP4 = (("NVFP4", "NVFP4"), ("MXFP4", "MXFP4"), ("MXFP8", "MXFP4"), ("MXFP8_E5M2", "MXFP4"))
_FP8_BLOCK = {("FP8_BLOCK", "FP8_BLOCK"): "FP8 tensor cores inside 128 of K (13 fractional bits), float32 across"}
_MXFP8 = dict.fromkeys(_EIGHT_BITS, "FP8 tensor cores inside 32 of K (13 fractional bits), float32 across")
_BF16_SUM = "bf16 or f16 tensor cores, values exact, float32 sum (25 fractional bits in 16 of K)"
_BF16_BLOCKS = "bf16 or f16 tensor cores inside 128 of K (25 fractional bits in 16), scaled and added in float32 across"
_BF16 = {pair: _BF16_BLOCKS if "FP8_BLOCK" in pair else _BF16_SUM for pair in sm90_bf16.PAIRS}
_PLAIN = {(BF16, BF16): "bf16 tensor cores, float32 sum (25 fractional bits in 16 of K)"}
_DENSE = dict.fromkeys(_EIGHT_BITS, "block-scaled tensor cores, float32 across K")
_SM100 = dict.fromkeys((*_EIGHT_BITS, *_BY_FP4), "block-scaled tensor cores, float32 across K")
_SM100["FP8_BLOCK", "FP8_BLOCK"] = "FP8 tensor cores inside 128 of K (25 fractional bits), float32 across"


def _routes(operations: Iterable[str], arch: str, pairs: _Pairs, module: str, any_n: bool = False) -> Iterator[Route]:
    for operation, ((a, b), accumulation) in itertools.product(operations, pairs.items()):
        yield Route(operation, arch, a, b, module, _HOSTS[module][1], accumulation, any_n)


# Where two rows differ in the module alone, the first is the default, whatever M, G and the groups' sizes are: kernels
# may add up differently, and the bits of a row must not depend on what is around it. A config of the other's class
# chooses the other. MXFP8 on Hopper: what each costs is in docs/kernels/sm90_mxfp8/index.md.
_PRODUCTS = ("grouped_gemm", "gemm")
ROUTES: tuple[Route, ...] = (
    *_routes(_PRODUCTS, HOPPER.name, _FP8_BLOCK, "sm90_fp8"),
    *_routes(_PRODUCTS, HOPPER.name, _MXFP8, "sm90_mxfp8"),
    *_routes(_PRODUCTS, HOPPER.name, _BF16, "sm90_bf16"),
    *_routes((QUANT,), HOPPER.name, _FP8_BLOCK, "sm90_fp8_quant"),
    *_routes((QUANT,), HOPPER.name, _MXFP8, "sm90_mxfp8_quant"),
    *_routes((QUANT,), HOPPER.name, {pair: _BF16[pair] for pair in sm90_bf16.QUANT_PAIRS}, "sm90_bf16_quant"),
    *_routes(("gemm",), BLACKWELL.name, _DENSE, "sm100_mxfp8_dense", any_n=True),
    *_routes(_PRODUCTS, BLACKWELL.name, _SM100, "sm100_grouped"),
    *_routes((QUANT,), BLACKWELL.name, _SM100, "sm100_grouped_quant"),
)
# Products of plain bfloat16 tensors on both sides, which no table of formats describes. They have calls of their own
# (padless.ops.grouped_gemm_plain).
PLAIN_ROUTES = tuple(_routes(_PRODUCTS, HOPPER.name, _PLAIN, "sm90_bf16_plain"))


def find_route(operation: str, arch: str, a: str, b: str, config: object = None) -> Route:
    """The route for formats ``a`` and ``b`` on ``arch``: the first of the tables, or the first that takes ``config``.

    ``config``: a kernel's configuration, or the class of one, which chooses the kernel and leaves the tile to it. The
    shape of the problem is not among the arguments, so that one kernel multiplies a pair of formats in every call.
    Raises ValueError that says what is supported instead.
    """
    arch = kernels_arch(arch)
    every = (*ROUTES, *PLAIN_ROUTES)
    here = [route for route in every if route.operation == operation and route.arch == arch]
    found = [route for route in here if (route.a, route.b) == (a, b)]
    if not found:
        pairs = ", ".join(dict.fromkeys(f"{route.a} x {route.b}" for route in here)) or "nothing yet"
        others = " or ".join(dict.fromkeys(route.a for route in here if route.b == b))
        remedy = f"quantize a to {others}; " if others else ""
        raise ValueError(f"{operation} of {a} x {b} has no kernel for {arch}; {remedy}supported there: {pairs}")
    return found[0] if config is None else _taking(config, found, f"{operation} of {a} x {b} on {arch}")


def check_config(operation: str, a: str, b: str, config: object) -> None:
    """Raises ValueError for a ``config`` that no kernel of ``operation`` takes for formats ``a`` and ``b``, anywhere.

    For the reference, which runs none of them: a call is refused on a CPU as it would be on a GPU.
    """
    if config is not None:
        found = [route for route in ROUTES if (route.operation, route.a, route.b) == (operation, a, b)]
        _taking(config, found, f"{operation} of {a} x {b}")


def _taking(config: object, found: Sequence[Route], call: str) -> Route:
    """The first route whose kernel takes ``config``. Raises ValueError where there is none."""
    wanted = config if isinstance(config, type) else type(config)
    for route in found:
        if issubclass(wanted, route.config_class):
            return route
    classes = " or ".join(dict.fromkeys(route.config_class.__name__ for route in found))
    raise ValueError(f"config is a {wanted.__name__}; {call} takes a {classes}")
