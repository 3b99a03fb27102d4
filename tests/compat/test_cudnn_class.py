"""GroupedGemmQuant: what the functions give, with tensors of the caller's own, and what it refuses."""

from __future__ import annotations

import gc
import math
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from padless import MXFP8, GroupedGemmQuant, grouped_gemm_quant, layouts
from padless.runtime.choices import BackendName
from support.quant_calls import as_cudnn, bits, check_groups, exact_d, operands, refused


def class_case(dtype: torch.dtype, m_aligned: int = 1) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """(arguments of execute, options, what the function returns for them)."""
    a, b, offs = operands(MXFP8)
    given = as_cudnn(a, b) | {
        "padded_offsets": offs,
        "alpha_tensor": torch.tensor([1.0, 2.0, -1.0, 0.5]),
        "prob_tensor": torch.rand(233, 1, 1),
        "norm_const_tensor": torch.tensor([0.5]) if dtype == torch.float8_e4m3fn else None,
    }
    wanted = grouped_gemm_quant(**given, d_dtype=dtype, m_aligned=m_aligned)
    own = {
        key: None if t is None else torch.empty_like(t, memory_format=torch.preserve_format)
        for key, t in wanted.items()
    }
    if own["amax_tensor"] is not None:
        own["amax_tensor"].fill_(-math.inf)
    return given | own, {"m_aligned": m_aligned}, wanted


def samples_of(given: dict[str, Any]) -> dict[str, Any]:
    return {"sample_" + name.removesuffix("_tensor"): t for name, t in given.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_the_class_computes_what_the_function_does(dtype: torch.dtype) -> None:
    given, options, wanted = class_case(dtype)
    api = GroupedGemmQuant(**samples_of(given), **options)
    assert api.check_support()
    with pytest.raises(RuntimeError, match="compile"):
        api.execute(**given)
    api.compile()
    api.execute(**given)
    for key, t in wanted.items():
        if t is not None and not key.startswith("sfd"):
            assert torch.equal(bits(given[key]), bits(t)), key
    if dtype == torch.float8_e4m3fn:
        got = layouts.from_blocked(layouts.from_cudnn_view(given["sfd_row_tensor"])[0], 233, 6)
        assert torch.equal(bits(got), bits(layouts.plain_scale(wanted.row)))
        # Blocks that exist: 70 rows are 3 in tile 0, 130 are 5 in tiles 1 and 2, 33 are 2 in tile 3.
        exist = [0, 1, 2, 4, 5, 6, 7, 8, 12, 13]
        one, two = (
            layouts.from_blocked(layouts.from_cudnn_view(t)[0], 192, 4 * wanted.column_tiles).view(torch.uint8)
            for t in (given["sfd_col_tensor"], wanted["sfd_col_tensor"])
        )
        assert torch.equal(one[:, exist], two[:, exist])


def test_the_class_refuses_by_name() -> None:
    given, options, _ = class_case(torch.float8_e4m3fn)
    for match, change in (
        (r"norm_const_tensor is None; sfd_row and norm_const are needed", {"norm_const_tensor": None}),
        (r"sfd_row_tensor is None", {"sfd_row_tensor": None}),
        (r"d_col_tensor and sfd_col_tensor must be given both or neither", {"sfd_col_tensor": None}),
        (r"which has no scales", {"d_tensor": torch.empty(233, 192, 1, dtype=torch.bfloat16)}),
        (r"d_tensor must be \(233, 192, 1\)", {"d_tensor": torch.empty(233, 96, 1, dtype=torch.float8_e4m3fn)}),
        (r"sfd_row_tensor has strides", {"sfd_row_tensor": given["sfd_row_tensor"].contiguous()}),
        (
            r"sfd_col_tensor has 2 column tiles; 4 groups of 233 rows .* m_aligned=256",
            {"sfd_col_tensor": given["sfd_col_tensor"][:, :, :, :, :2]},
        ),
        (r"amax_tensor must be \(4, 1\)", {"amax_tensor": torch.empty(4)}),
        (r"alpha_tensor must be \(4,\)", {"alpha_tensor": torch.ones(5)}),
    ):
        refused(GroupedGemmQuant(**samples_of(given | change), **options).check_support, match)


def test_the_class_takes_other_rows_and_no_other_kind_of_call() -> None:
    given, options, _ = class_case(torch.bfloat16)
    api = GroupedGemmQuant(**samples_of(given), **options)
    api.compile()
    a, b, offs = operands(MXFP8, [5, 6, 7, 8], seed=9)
    other = (
        given
        | as_cudnn(a, b)
        | {
            "padded_offsets": offs,
            "prob_tensor": torch.rand(26, 1, 1),
            "d_tensor": torch.empty(26, 192, 1, dtype=torch.bfloat16),
        }
    )
    api.execute(**other)
    wanted = exact_d(a, b, offs, given["alpha_tensor"], other["prob_tensor"])
    check_groups(other["d_tensor"][:, :, 0], wanted, offs, 0.1, 0.01)
    refused(api.execute, r"alpha_tensor is NoneType; the samples came with one", **(given | {"alpha_tensor": None}))
    halves = torch.empty(233, 192, 1, dtype=torch.float16)
    refused(api.execute, r"the tensors differ from the samples", **(given | {"d_tensor": halves}))


def compiled(backend: BackendName) -> tuple[GroupedGemmQuant, list[StorageWeakRef]]:
    """An object that compiled, and the memory of its samples."""
    given, options, _ = class_case(torch.float8_e4m3fn)
    api = GroupedGemmQuant(**samples_of(given), **options, backend=backend)
    api.compile()
    return api, [StorageWeakRef(t.untyped_storage()) for t in given.values() if t is not None]


@pytest.mark.parametrize("backend", ["reference", "emulator"])
def test_the_class_lets_go_of_its_samples_when_it_has_compiled(backend: BackendName) -> None:
    """They may be as large as a layer's activations, and the object lives as long as the model."""
    api, samples = compiled(backend)
    gc.collect()
    assert all(memory.expired() for memory in samples)
    assert api.check_support()
    api.compile()
