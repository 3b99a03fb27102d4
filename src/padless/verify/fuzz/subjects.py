"""The calls that are fuzzed: how each one's problems are drawn and judged, where it runs, and how often."""

from __future__ import annotations

from functools import partial

from padless.runtime.choices import BackendName
from padless.verify.bf16 import fuzz as plain
from padless.verify.fuzz import (
    activations,
    adapted_layers,
    adapters,
    decode,
    epilogue_lines,
    epilogues,
    input_gradients,
    kinds,
    layers,
    product_lines,
    products,
    quantizers,
    training,
    whole_layer,
)
from padless.verify.fuzz.place import Place
from padless.verify.fuzz.problem import Problem, Subject
from padless.verify.fuzz.states.subjects import STATES

_QUANT = partial(epilogues.constants, (None,))
_SWIGLU = partial(epilogues.constants, ("interleaved", "concatenated"))
_EPILOGUE = partial(epilogues.constants, (None, "interleaved", "concatenated"))
_BY_CUDNN = partial(epilogues.rest, ("near", "changes"))

_HOPPER = ("reference", "sm_90a")

SUBJECTS: dict[str, Subject] = {
    "grouped_gemm": Subject(
        partial(products.pair, operation="grouped_gemm"), products.shape, products.judge_grouped_gemm, 24, 8,
        emulated=True, lines=product_lines.small
    ),
    "gemm": Subject(
        partial(products.pair, operation="gemm"), products.one_group, products.judge_gemm, 8, 3, emulated=True,
        lines=product_lines.small_dense
    ),
    "grouped_gemm_list": Subject(
        products.list_constants, products.list_rest, products.judge_list, 4, 3, ("reference", "sm_100a"),
        emulated=True, lines=product_lines.small_lists
    ),
    "scaled_grouped_mm": Subject(
        products.torch_constants, products.torch_rest, products.judge_scaled_grouped_mm, 5, 1, _HOPPER
    ),
    "grouped_gemm_quant": Subject(_QUANT, _BY_CUDNN, epilogues.judge_epilogue, 7, 3, emulated=True),
    "grouped_gemm_swiglu_quant": Subject(_SWIGLU, _BY_CUDNN, epilogues.judge_epilogue, 7, 3, emulated=True),
    "grouped_gemm_epilogue": Subject(
        _EPILOGUE, partial(epilogues.rest, ("near",)), epilogues.judge_epilogue, 7, 3, emulated=True,
        lines=epilogue_lines.small
    ),
    "quantize": Subject(
        quantizers.constants, quantizers.rest, quantizers.judge_quantize, 20, 12, kind=kinds.quantize,
        lines=quantizers.lines
    ),
    "quantize_weight_both": Subject(
        quantizers.both_constants, quantizers.both_rest, quantizers.judge_weight_both, 6, 4, kind=kinds.weight_both,
        lines=quantizers.both_lines
    ),
    "quantize_nvfp4_stochastic": Subject(
        quantizers.random_constants, quantizers.random_rest, quantizers.judge_random, 3, 2, kind=kinds.random,
        lines=quantizers.random_lines
    ),
    "quantize_rows_columns": Subject(
        quantizers.columns_constants, quantizers.columns_rest, quantizers.judge_rows_columns, 6, 4,
        kind=kinds.rows_columns, lines=quantizers.columns_lines
    ),
    "swiglu_backward_quantize": Subject(
        training.swiglu_constants, training.swiglu_rest, training.judge_swiglu_backward, 5, 4,
        kind=kinds.swiglu_backward, lines=training.swiglu_lines
    ),
    "grouped_gemm_wgrad": Subject(
        training.wgrad_constants, training.wgrad_rest, training.judge_wgrad, 8, 3, _HOPPER, emulated=True,
        lines=training.wgrad_lines
    ),
    "plain.grouped_gemm": Subject(
        plain.product_constants, plain.product_rest, plain.judge_product, 8, 3, _HOPPER, emulated=True,
        lines=plain.product_lines
    ),
    "plain.grouped_gemm_wgrad": Subject(
        plain.wgrad_constants, plain.wgrad_rest, plain.judge_wgrad, 4, 2, _HOPPER, emulated=True,
        lines=plain.wgrad_lines
    ),
    "fp4_input_gradient": Subject(
        input_gradients.constants, input_gradients.rest, input_gradients.judge, 4, 2, _HOPPER, emulated=True,
        lines=input_gradients.lines
    ),
    "moe.route": Subject(
        layers.routing_constants, layers.routing_rest, layers.judge_route, 8, 5, kind=kinds.route,
        lines=layers.routing_lines
    ),
    "moe.gather_quantize": Subject(
        layers.gather_constants, layers.gather_rest, layers.judge_gather_quantize, 7, 6, kind=kinds.gather,
        lines=layers.gather_lines
    ),
    "moe.activate_quantize": Subject(
        activations.constants, activations.rest, activations.judge, 6, 5, kind=kinds.activate, lines=activations.lines
    ),
    "moe.combine": Subject(
        layers.combine_constants, layers.combine_rest, layers.judge_combine, 7, 5, kind=kinds.combine,
        lines=layers.combine_lines
    ),
    "moe.decode": Subject(
        decode.constants, decode.rest, decode.judge_decode, 4, 3, _HOPPER, emulated=True, lines=decode.lines
    ),
    "moe.moe": Subject(
        whole_layer.layer_constants, whole_layer.layer_rest, whole_layer.judge_moe, 4, 1, emulated=True,
        lines=whole_layer.lines
    ),
    "nn.LoraGroupedLinear": Subject(adapters.constants, adapters.rest, adapters.judge_linear, 3, 2, _HOPPER),
    "nn.LoraExperts": Subject(adapted_layers.constants, adapted_layers.rest, adapted_layers.judge_layer, 3, 2, _HOPPER),
}  # fmt: skip


def subjects_of(backend: BackendName, arch: str, states: bool = False) -> dict[str, Subject]:
    """The calls, or the sequences of operations, that there are for a backend, whose kernels are ``arch``'s."""
    where = "reference" if backend == "reference" else arch
    emulator = backend.startswith("emulator")
    every = STATES if states else SUBJECTS
    return {name: s for name, s in every.items() if where in s.kernels and (s.emulated or not emulator)}


def subject_of(problem: Problem) -> Subject:
    """Raises ValueError for a call that is not fuzzed."""
    subjects = SUBJECTS | STATES
    if problem.call not in subjects:
        raise ValueError(f"problem is of {problem.call!r}; allowed: {', '.join(subjects)}")
    return subjects[problem.call]


def judged(problem: Problem, place: Place) -> list[str]:
    """Findings about one problem: names of judgements, or the error of a call that raised. Waits for the device.

    A call that is refused with a ValueError has nothing wrong, but with the reference, which refuses none.
    """
    place.judge.problem = 0
    try:
        subject_of(problem).judge(problem.options, place)
    except Exception as error:
        place.judge.verdicts()
        if isinstance(error, ValueError) and place.has_kernels:
            return []
        return [f"raised {type(error).__name__}: {error}"]
    return place.judge.verdicts().get(0, [])
