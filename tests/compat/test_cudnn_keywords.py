"""The words of cuDNN frontend 1.32's calls: every keyword at its default, 2-D tensors, and what is refused."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from padless import FP8_BLOCK, MXFP4, MXFP8, NVFP4, GroupedGemmQuant, grouped_gemm_quant, grouped_gemm_swiglu_quant
from padless.compat.cudnn.keywords import ONE_VALUE, ONE_VALUE_OF_GLU
from support import cudnn_keywords as words
from support.quant_calls import as_cudnn, bits, operands


def test_every_keyword_is_taken_at_its_default() -> None:
    changes = {name: value for name, value in words.CALL.items() if value != words.NEEDED}
    for name in ("b_tensor", "sfb_tensor"):
        del changes[name]
    changes |= {"sf_vec_size": 32, "m_aligned": 1}  # what cuDNN's tensors of these groups would not have
    plain, all_given = words.call(), words.call(**changes)
    assert torch.equal(plain["d_tensor"], all_given["d_tensor"])
    assert torch.equal(plain["amax_tensor"], all_given["amax_tensor"])
    assert words.call(generate_amax=False)["amax_tensor"] is None
    a, b, offs = operands(MXFP8, n=256)
    swiglu: dict[str, Any] = {"gate_up": "interleaved", "padded_offsets": offs, **as_cudnn(a, b)}
    one = grouped_gemm_swiglu_quant(**swiglu, **words.GLU, use_dynamic_sched=True)
    assert torch.equal(one["d_tensor"], grouped_gemm_swiglu_quant(**swiglu)["d_tensor"])


@pytest.mark.parametrize("name", ONE_VALUE)
def test_another_value_gets_a_sentence(name: str) -> None:
    value = words.ANOTHER.get(name, torch.ones(4))
    with pytest.raises(ValueError, match=f"{name} is .*; it must be .*: ") as caught:
        words.call(**{name: value})
    assert str(caught.value) == words.sentence(name)
    with pytest.raises(ValueError, match=f"{name} is "):
        GroupedGemmQuant(**dict.fromkeys(_SAMPLES), **{name: value})


@pytest.mark.parametrize("name", ONE_VALUE_OF_GLU)
def test_another_value_of_the_glu_call_gets_a_sentence(name: str) -> None:
    a, b, offs = operands(MXFP8, n=256)
    given = {"padded_offsets": offs, **as_cudnn(a, b), name: words.ANOTHER[name]}
    with pytest.raises(ValueError, match=f"{name} is .*; it must be .*: ") as caught:
        grouped_gemm_swiglu_quant(gate_up="interleaved", **given)
    assert str(caught.value) == words.sentence(name)
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        words.call(**{name: words.GLU[name]})


_SAMPLES = ("sample_a", "sample_b", "sample_d", "sample_sfa", "sample_sfb", "sample_padded_offsets")


@pytest.mark.parametrize("name", ["tiler", "b_tensors", "row_scale"])
def test_a_word_that_cudnn_has_not_is_a_type_error(name: str) -> None:
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        words.call(**{name: None})


def test_the_page_has_the_table() -> None:
    assert words.written() == words.table(), "write it again: python tests/support/cudnn_keywords.py --write"
    assert words.known() <= {*words.CALL, *words.CLASS, *words.GLU}


def flat(tensors: dict[str, torch.Tensor], scales: str) -> dict[str, torch.Tensor]:
    """2-D A, (G, N, K) B, and the scales' bytes as they lie."""
    changed = {"a_tensor": tensors["a_tensor"][:, :, 0], "b_tensor": tensors["b_tensor"].permute(2, 0, 1)}
    for name in ("sfa_tensor", "sfb_tensor"):
        physical = tensors[name].permute(5, 2, 4, 0, 1, 3).contiguous()
        changed[name] = physical if scales == "physical" else physical.flatten()
    return tensors | changed


@pytest.mark.parametrize("format", [MXFP8, MXFP4, NVFP4], ids=lambda f: f.name)
@pytest.mark.parametrize("scales", ["physical", "flat"])
def test_tensors_without_a_last_dimension_give_the_same_bytes(format: Any, scales: str) -> None:
    """N is K, so that strides alone tell the two layouts of B apart."""
    a, b, offs = operands(format, n=192, k=192)
    tensors = as_cudnn(a, b)
    bias = torch.randn(192, 4)
    options: dict[str, Any] = {"padded_offsets": offs, "bias_tensor": bias, "d_dtype": torch.float8_e4m3fn}
    one = grouped_gemm_quant(**tensors, **options)
    two = grouped_gemm_quant(**flat(tensors, scales), **options)
    assert two["d_tensor"].shape == two["d_col_tensor"].shape == (233, 192)
    assert torch.equal(bits(one["d_tensor"][:, :, 0]), bits(two["d_tensor"]))
    assert torch.equal(bits(one["d_col_tensor"][:, :, 0]), bits(two["d_col_tensor"]))
    for name, row_tiles in (("sfd_row_tensor", 2), ("sfd_col_tensor", 2)):
        assert two[name].is_contiguous()
        assert two[name].shape[:2] == (1, row_tiles)
        assert torch.equal(bits(two[name].permute(3, 4, 1, 5, 2, 0)), bits(one[name]))
    mixed = tensors | {"b_tensor": tensors["b_tensor"].permute(2, 0, 1)}
    assert torch.equal(bits(grouped_gemm_quant(**mixed, **options)["d_tensor"]), bits(one["d_tensor"]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a_tensor": torch.ones(3)}, r"a_tensor must be a \(M, K\) or \(M, K, 1\) tensor"),
        ({"a_tensor": torch.ones(3, 4, 2)}, r"a_tensor must be a \(M, K\) or \(M, K, 1\) tensor"),
        ({"b_tensor": torch.ones(3, 4)}, r"b_tensor must be a \(N, K, G\) or \(G, N, K\) tensor"),
        ({"sfa_tensor": torch.ones(7).to(torch.float8_e8m0fnu)}, "or as many bytes in any contiguous shape"),
    ],
)
def test_other_shapes_are_refused(change: dict[str, Any], message: str) -> None:
    a, b, offs = operands(MXFP8)
    with pytest.raises(ValueError, match=message):
        grouped_gemm_quant(**(as_cudnn(a, b) | {"padded_offsets": offs} | change))


def test_own_operands_take_the_words_too() -> None:
    a, b, offs = operands(FP8_BLOCK)
    one = grouped_gemm_quant(a_tensor=a, b_tensor=b, padded_offsets=offs, d_dtype=None, acc_dtype=None, b_major="k")
    assert one["d_tensor"].dtype == torch.bfloat16


@pytest.mark.parametrize("call", [grouped_gemm_quant, grouped_gemm_swiglu_quant])
def test_the_signature_is_that_of_the_request(call: Any) -> None:
    """Tensors and gate_up have to be given; d_tensor and the like are taken by **others, which help() shows too."""
    parameters = inspect.signature(call).parameters
    assert [p.name for p in parameters.values() if p.kind is p.VAR_KEYWORD] == ["others"]
    needed = {p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY and p.default is p.empty}
    assert needed == {"a_tensor", "b_tensor", "padded_offsets"} | ({"gate_up"} & parameters.keys())
    assert ("gate_up" in parameters) == (call is grouped_gemm_swiglu_quant)
    with pytest.raises(TypeError, match=rf"{call.__name__}\(\) has no a_tensor and no padded_offsets"):
        call(b_tensor=torch.ones(1), **dict.fromkeys(needed & {"gate_up"}, "interleaved"))
