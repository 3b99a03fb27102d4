"""The benchmarks: a `Case` for each, by which `padless bench`, its runs and its reports know it.

What a benchmark does is its module `padless.bench.cases.<name>`, which is imported when it is needed: this one imports
nothing, so that the command line can name them all immediately. Such a module has

    grid(name, seed)                   the points of a named grid: dataclasses
    measure_at(session, point)         the record of a point
    start(session)                     in its place where a run makes something once: the function that measures a point
    tables(records, sessions, width)   tables of records, and sentences between them, for a terminal of so many columns
    draw(records, path)                where its Case has a figure: the picture's Path, None where nothing can be drawn
    session_facts()                    where it has some: further fields of a run's session record
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

RUN = ("out", "time_limit")
FULL = ("full", *RUN)
PEERS = ("full", "peers", "only", *RUN, "repeats")


@dataclass(frozen=True)
class Case:
    """A benchmark.

    name: of the command, of the records' kind and of the result file. about: the command's help.
    options: of the command. grids: names that `grid` takes, of which ``default`` is that of a call from Python.
    peers: names of libraries it is compared with; () none, None all that have a product. repeats: timed calls.
    compiles: whether the kernels of all points are compiled before the first is timed.
    figure: the picture's file name, "" for none. needs: a function of the module that raises ValueError where it
    cannot run.
    """

    name: str
    about: str
    options: tuple[str, ...] = FULL
    grids: tuple[str, ...] = ("quick", "full")
    default: str = "quick"
    peers: tuple[str, ...] | None = ()
    repeats: int = 10
    compiles: bool = False
    figure: str = ""
    needs: str = ""

    def load(self) -> Any:
        """The benchmark's module."""
        return import_module(f"padless.bench.cases.{self.name}")


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case(
            "paper",
            "The paper's grid: against padding plus the same GEMM, time, memory saved and equality of valid rows.",
            ("full", "balanced", *PEERS[1:]),
            ("quick", "balanced", "full"),
            peers=None,
            compiles=True,
            figure="figure2.png",
        ),
        Case("dense", "One group: the dense product.", PEERS, default="full", peers=None),
        Case("decode", "A few rows per group, as when generating token by token.", PEERS, peers=None, compiles=True),
        Case(
            "chain",
            "Calls one after the other in a CUDA graph: what it is worth that kernels may overlap.",
            ("full", "peers", *RUN, "repeats"),
            peers=("deepgemm",),
            repeats=5,
            compiles=True,
            needs="require_programmatic_launches",
        ),
        Case(
            "formats",
            "Every pair of formats against torch's bf16 product, at prefill and decode sizes.",
            figure="formats.png",
        ),
        Case(
            "epilogue", "The fused quantizing epilogue, against the same GEMM alone and with separate kernels after it."
        ),
        Case(
            "wgrad",
            "Weight gradients along the tokens of ragged groups, against torch's bf16 product and DeepGEMM.",
            ("full", "peers", *RUN, "repeats"),
            peers=("deepgemm",),
        ),
        Case(
            "layer",
            "A whole Mixture-of-Experts layer against torch's bf16, and the passes around its products.",
            ("full", "peers", *RUN, "repeats"),
            peers=("deepgemm",),
        ),
        Case(
            "decoding",
            "Layers of ten models at 1 to 64 tokens in CUDA graphs, against other libraries' kernels.",
            ("models", "tokens", *PEERS[1:]),
            ("full",),
            "full",
            peers=("triton", "deepgemm", "monomoe"),
            figure="decoding.png",
        ),
        Case(
            "model",
            "Prefill of a whole random model of transformers: padless' FP8 experts against transformers' bf16.",
            FULL,
            needs="require_transformers",
        ),
        Case(
            "generate",
            "Decoding steps of whole random models of transformers in CUDA graphs: padless' experts against bf16 ones.",
            (*FULL, "repeats"),
            needs="require_transformers",
        ),
        Case(
            "train",
            "A layer's training step, forward and backward, in padless' recipes against torch's bf16.",
            ("full", "peers", *RUN, "repeats"),
            peers=("torchao",),
            repeats=5,
        ),
        Case(
            "pretrain",
            "Training steps of a whole decoder like Qwen3-30B-A3B: padless' FP8 experts against torch's bf16.",
            ("full", "ranks", *RUN, "repeats"),
            repeats=5,
        ),
        Case(
            "ep",
            "Expert parallelism on all GPUs of this host: dispatch, combine and layer against NCCL's all_to_all.",
            ("full", "peers", *RUN, "repeats"),
            repeats=50,
            needs="require_gpus",
        ),
        Case(
            "adapters",
            "Adapters of rank 16 over frozen experts: forward, a training step, decoding, a model's layers.",
            ("part", "models", "tokens", *RUN, "repeats"),
            ("full",),
            "full",
        ),
        Case(
            "blackwell",
            "For a B200: dense MXFP8 against torch, and the NVFP4 grouped GEMM competition by its timing rules.",
            RUN,
            ("full",),
            "full",
        ),
        Case(
            "quantize",
            "The quantizers and the padding kernel, against a device copy of the same bytes.",
            ("full", "out"),
            default="full",
        ),
        Case(
            "tiles",
            "Every tile of FP8_BLOCK's kernel on the same problems, in turns: how good the choice of a tile is.",
            ("full", *RUN, "repeats"),
        ),
        Case(
            "picks",
            "Picked configurations of Hopper's kernels next to every legal one, on 400 drawn problems.",
            ("models", "tokens", "part", *RUN, "repeats"),
            ("full",),
            "full",
            repeats=5,
            needs="require_hopper",
        ),
    )
}
