"""The calls that are fuzzed: how each one's problems are drawn and judged, where it runs, and how often."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from padless.runtime.choices import BackendName
from padless.verify.bf16 import fuzz as plain
from padless.verify.fuzz import epilogues, kinds, layers, products, quantizers, training, whole_layer
from padless.verify.fuzz.place import Place
from padless.verify.fuzz.problem import Draw, Options, Problem

EVERYWHERE = ("reference", "sm_90a", "sm_100a")
_TRIES = 256  # draws of a problem of one kind, the rarest of which is one in a hundred


@dataclass(frozen=True)
class Model:
    """Common part of a worker's problems of a call, so that one compilation serves many of them."""

    constants: Options
    kind: kinds.Kind


@dataclass(frozen=True)
class Subject:
    """One call.

    constants: draws what kernels are compiled for. rest: draws the other options, given those.
    judge: makes the call and says what is wrong to the place's judge; a ValueError means that the call was refused.
    share: how many problems out of all subjects' sum.
    variants: how many draws of constants a worker has, so that compiling does not take its time.
    kernels: architectures whose kernels make the call, with "reference" for torch on a CPU.
    emulated: whether the emulator has something to do with it.
    kind: of a problem's options; see `padless.verify.fuzz.kinds`.
    """

    constants: Callable[[Draw], Options]
    rest: Callable[[Draw, Options], Options]
    judge: Callable[[Options, Place], None]
    share: int
    variants: int
    kernels: tuple[str, ...] = EVERYWHERE
    emulated: bool = False
    kind: kinds.KindOf = lambda options: ()

    def draw(self, name: str, draw: Draw, model: Model | None = None) -> Problem:
        """A problem: any, or one as the model's."""
        fixed = self.constants(draw) if model is None else model.constants
        options = fixed | self.rest(draw, fixed)
        for _ in range(0 if model is None else _TRIES):
            if model is None or self.kind(options) == model.kind:
                break
            options = fixed | self.rest(draw, fixed)
        return Problem(name, options)

    def model(self, draw: Draw) -> Model:
        fixed = self.constants(draw)
        return Model(fixed, self.kind(fixed | self.rest(draw, fixed)))


_QUANT = partial(epilogues.constants, (None,))
_SWIGLU = partial(epilogues.constants, ("interleaved", "concatenated"))
_EPILOGUE = partial(epilogues.constants, (None, "interleaved", "concatenated"))

SUBJECTS: dict[str, Subject] = {
    "grouped_gemm": Subject(
        partial(products.pair, operation="grouped_gemm"),
        products.shape,
        products.judge_grouped_gemm,
        24,
        8,
        emulated=True,
    ),
    "gemm": Subject(
        partial(products.pair, operation="gemm"), products.one_group, products.judge_gemm, 8, 3, emulated=True
    ),
    "grouped_gemm_list": Subject(
        products.list_constants, products.list_rest, products.judge_list, 4, 3, ("reference", "sm_100a"), emulated=True
    ),
    "scaled_grouped_mm": Subject(
        products.torch_constants, products.torch_rest, products.judge_scaled_grouped_mm, 5, 1, ("reference", "sm_90a")
    ),
    "grouped_gemm_quant": Subject(_QUANT, epilogues.rest, epilogues.judge_quant, 7, 3, emulated=True),
    "grouped_gemm_swiglu_quant": Subject(_SWIGLU, epilogues.rest, epilogues.judge_quant, 7, 3, emulated=True),
    "grouped_gemm_epilogue": Subject(_EPILOGUE, epilogues.rest, epilogues.judge_epilogue, 7, 3, emulated=True),
    "quantize": Subject(quantizers.constants, quantizers.rest, quantizers.judge_quantize, 20, 12, kind=kinds.quantize),
    "quantize_weight_both": Subject(
        quantizers.both_constants, quantizers.both_rest, quantizers.judge_weight_both, 6, 4, kind=kinds.weight_both
    ),
    "quantize_rows_columns": Subject(
        quantizers.columns_constants,
        quantizers.columns_rest,
        quantizers.judge_rows_columns,
        6,
        4,
        kind=kinds.rows_columns,
    ),
    "swiglu_backward_quantize": Subject(
        training.swiglu_constants,
        training.swiglu_rest,
        training.judge_swiglu_backward,
        5,
        4,
        kind=kinds.swiglu_backward,
    ),
    "grouped_gemm_wgrad": Subject(
        training.wgrad_constants,
        training.wgrad_rest,
        training.judge_wgrad,
        8,
        3,
        ("reference", "sm_90a"),
        emulated=True,
    ),
    "plain.grouped_gemm": Subject(
        plain.product_constants, plain.product_rest, plain.judge_product, 8, 3, ("reference", "sm_90a"), emulated=True
    ),
    "plain.grouped_gemm_wgrad": Subject(
        plain.wgrad_constants, plain.wgrad_rest, plain.judge_wgrad, 4, 2, ("reference", "sm_90a"), emulated=True
    ),
    "moe.route": Subject(layers.routing_constants, layers.routing_rest, layers.judge_route, 8, 5, kind=kinds.route),
    "moe.gather_quantize": Subject(
        layers.gather_constants, layers.gather_rest, layers.judge_gather_quantize, 7, 6, kind=kinds.gather
    ),
    "moe.activate_quantize": Subject(
        layers.activation_constants, layers.activation_rest, layers.judge_activate_quantize, 6, 5, kind=kinds.activate
    ),
    "moe.combine": Subject(
        layers.combine_constants, layers.combine_rest, layers.judge_combine, 7, 5, kind=kinds.combine
    ),
    "moe.moe": Subject(whole_layer.layer_constants, whole_layer.layer_rest, whole_layer.judge_moe, 4, 1, emulated=True),
}


def subjects_of(backend: BackendName, arch: str) -> dict[str, Subject]:
    """The calls that there are for a backend, whose kernels are ``arch``'s."""
    where = "reference" if backend == "reference" else arch
    emulator = backend.startswith("emulator")
    return {name: s for name, s in SUBJECTS.items() if where in s.kernels and (s.emulated or not emulator)}


def judged(problem: Problem, place: Place) -> list[str]:
    """What is wrong with one problem: names of judgements, or the error of a call that raised. Waits for the device.

    A call that is refused with a ValueError has nothing wrong, but with the reference, which refuses none.
    """
    place.judge.problem = 0
    if problem.call not in SUBJECTS:
        raise ValueError(f"problem is of {problem.call!r}; allowed: {', '.join(SUBJECTS)}")
    try:
        SUBJECTS[problem.call].judge(problem.options, place)
    except Exception as error:
        place.judge.verdicts()
        if isinstance(error, ValueError) and place.has_kernels:
            return []
        return [f"raised {type(error).__name__}: {error}"]
    return place.judge.verdicts().get(0, [])
