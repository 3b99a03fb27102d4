"""The planted bugs of the decoding layer's kernel of FP4 weights; those of what it shares with FP8's are there."""

from __future__ import annotations

from padless.kernels.sm90_moe_decode.config_fp4 import MoeDecodeFp4Config
from padless.moe.fused import gate_rule_of
from support.moe_decode_fp4_cases import GPT_OSS
from support.planted_bugs import Bug

FOLDER = "sm90_moe_decode/"
MAIN = FOLDER + "sm90_moe_decode_fp4.cu"
STORAGE, ROWS, LOAD, MULTIPLY, CONSUME = (
    f"{FOLDER}fp4/{name}.cuh" for name in ("storage", "rows", "load", "multiply", "consume")
)

BAR = "bar_sync(CODES_BARRIER, NUM_CONSUMERS);"
FIRST_HALF = "mma_m16n8k16_bf16(d, a[0], x[0], x[1]);"
SECOND_HALF = "mma_m16n8k16_bf16(d, a[1], x[2], x[3]);"
ROUNDED = "__uint_as_float(cvt_bf16x2(0.0f, d[2 * g + j]))"

# Waits that do not end trap. Without it the emulator has to go on until it is sure of that.
IMPATIENT = MoeDecodeFp4Config(gate_rule_of(GPT_OSS), spin_limit=200_000)

BUGS: tuple[Bug, ...] = (
    # ---- from CTA to CTA, and from launch to launch
    Bug("hidden rows are not waited for", "",
        (ROWS, "w[0] == 0 || w[1] == 0 || w[2] == 0 || w[3] == 0;", "false;"), quick=True),
    Bug("a word is no complement", "", (CONSUME, "~pair", "pair")),
    Bug("a row's words without its padding", "", (STORAGE, "(i + BLOCK_K - 1) / BLOCK_K * (BLOCK_K / 2)", "i / 2")),
    Bug("no griddepcontrol.wait", "grid-dependency", (MAIN, "griddepcontrol_wait();", ""), quick=True),
    # ---- inside of a CTA
    Bug("rows of x are not waited for", "race uninitialised-shared", (MAIN, BAR, ""), quick=True),
    Bug("hidden rows over those of x", "race", (MAIN, BAR, ""), nth=1),
    Bug("hidden rows of other warps are not waited for", "race uninitialised-shared", (MAIN, BAR, ""), nth=2),
    Bug("results are not waited for", "race uninitialised-shared", (CONSUME, BAR, "")),
    Bug("results over those that are read", "race", (CONSUME, BAR, ""), nth=1, seeds=8),
    Bug("a stage is not waited for", "race uninitialised-shared",
        (LOAD, "mbarrier_wait(next.full, position_.phase);", "")),
    Bug("a stage is asked for behind its loads, before their values are needed", "unread-load",
        (MULTIPLY, "BEFORE = 4;", "BEFORE = 3;"), quick=True),
    Bug("a stage more than there is", "race", (MAIN, "s < stages; ++s) loader", "s <= stages; ++s) loader")),
    Bug("routing is not waited for", "race uninitialised-shared", (MAIN, "mbarrier_wait(routed, 0); Ring", "Ring")),
    # ---- arithmetic
    Bug("scales past the end of K", "", (MULTIPLY, "4 * b + lane % 4 < columns ? byte : 0", "byte")),
    Bug("no second factor", "", (MULTIPLY, "if (HAS_LARGE)", "if (false)")),
    Bug("the halves of an octet in another order", "",
        (MULTIPLY, f"{FIRST_HALF} {SECOND_HALF}", f"{SECOND_HALF} {FIRST_HALF}"), quick=True),
    Bug("the columns of a pair exchanged", "", (CONSUME, "upper ? cvt_bf16x2(", "!upper ? cvt_bf16x2(")),
    Bug("up with gate's bias", "", (CONSUME, "__fadd_rn(d[3], bias.y)", "__fadd_rn(d[3], bias.x)")),
    Bug("a bias after rounding", "", (CONSUME, "__fadd_rn(d[2 * g + j], bias[g])", f"__fadd_rn({ROUNDED}, bias[g])")),
    Bug("scales of another row", "", (MULTIPLY, "h * Unit::SCALES_OF_ROW", "0")),
    Bug("rows of 32 before", "", (MULTIPLY, "first / 32 % 4", "first / 32 % 2")),
    Bug("scales that have a second factor are missed", "", (MULTIPLY, "mxfp4_is_large(any)", "false"), quick=True),
    Bug("an octet with the rows of the one before", "", (MULTIPLY, "read_rows(octet + 1);", "read_rows(octet);")),
    Bug("one block of the last stage is left out", "", (MULTIPLY, "columns > 4 ?", "columns > 8 ?")),
    Bug("both groups of a unit with the first expert's rows", "", (CONSUME, "unit.is_paired ? n / 4 : 0", "0")),
    Bug("the second expert's rows from the first column on", "", (CONSUME, "(unit.is_paired ? 4 * g : 0);", "0;")),
)  # fmt: skip
