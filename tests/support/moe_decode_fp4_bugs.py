"""The planted bugs of the decoding layer's kernel of FP4 weights; those of what it shares with FP8's are there."""

from __future__ import annotations

from padless.kernels.sm90_moe_decode.config_fp4 import MoeDecodeFp4Config
from padless.moe.fused import gate_rule_of
from support.moe_decode_fp4_cases import GPT_OSS
from support.planted_bugs import Bug

FOLDER = "sm90_moe_decode/"
MAIN = FOLDER + "sm90_moe_decode_fp4.cu"
STORAGE, ROWS, MULTIPLY, CONSUME = (f"{FOLDER}fp4/{name}.cuh" for name in ("storage", "rows", "multiply", "consume"))

BAR = "bar_sync(CODES_BARRIER, NUM_CONSUMERS);"
FIRST_HALF = "mma_m16n8k16_bf16(d, a[0], x[0], x[1]);"
SECOND_HALF = "mma_m16n8k16_bf16(d, a[1], x[2], x[3]);"
ROUNDED = "__uint_as_float(cvt_bf16x2(0.0f, d[2 + j]))"
BEGIN, FINISH = (f"product.{call}(d, second, rows + 4 * step_bytes, step_bytes);" for call in ("begin", "finish"))

# Waits that do not end trap. Without it the emulator has to go on until it is sure of that.
IMPATIENT = MoeDecodeFp4Config(gate_rule_of(GPT_OSS), spin_limit=50000)

BUGS: tuple[Bug, ...] = (
    # ---- from CTA to CTA, and from launch to launch
    Bug(
        "hidden rows are not waited for",
        (),
        ((ROWS, "w[0] == 0 || w[1] == 0 || w[2] == 0 || w[3] == 0;", "false;"),),
        quick=True,
    ),
    Bug("a word is no complement", (), ((CONSUME, "~pair", "pair"),)),
    Bug("a row's words without its padding", (), ((STORAGE, "(i + BLOCK_K - 1) / BLOCK_K * (BLOCK_K / 2)", "i / 2"),)),
    Bug("no griddepcontrol.wait", ("grid-dependency",), ((MAIN, "griddepcontrol_wait();", ""),), quick=True),
    # ---- inside of a CTA
    Bug("rows of x are not waited for", ("race", "uninitialised-shared"), ((MAIN, BAR, ""),), quick=True),
    Bug("hidden rows over those of x", ("race",), ((MAIN, BAR, ""),), nth=1),
    Bug("hidden rows of other warps are not waited for", ("race", "uninitialised-shared"), ((MAIN, BAR, ""),), nth=2),
    Bug("results are not waited for", ("race", "uninitialised-shared"), ((CONSUME, BAR, ""),)),
    Bug("results over those that are read", ("race",), ((CONSUME, BAR, ""),), nth=1, seeds=8),
    Bug(
        "a stage is not waited for",
        ("race", "uninitialised-shared"),
        ((MULTIPLY, "mbarrier_wait(shared_address(&shared.full[warp][position.stage]), position.phase);", ""),),
    ),
    Bug(
        "a stage is asked for behind its loads, before their values are needed",
        ("unread-load",),
        ((MULTIPLY, BEGIN, ""), (MULTIPLY, FINISH, f"{BEGIN} {FINISH}")),
        quick=True,
    ),
    Bug("a stage more than there is", ("race",), ((MAIN, "s < stages; ++s) loader", "s <= stages; ++s) loader"),)),
    Bug(
        "routing is not waited for",
        ("race", "uninitialised-shared"),
        ((MAIN, "mbarrier_wait(routed, 0); WeightLoader", "WeightLoader"),),
    ),
    # ---- arithmetic
    Bug("scales past the end of K", (), ((MULTIPLY, "4 * b + lane % 4 < columns ? byte : 0", "byte"),)),
    Bug("no second factor", (), ((MULTIPLY, "if (HAS_LARGE)", "if (false)"),)),
    Bug(
        "the halves of an octet in another order",
        (),
        ((MULTIPLY, f"{FIRST_HALF} {SECOND_HALF}", f"{SECOND_HALF} {FIRST_HALF}"),),
        quick=True,
    ),
    Bug("the columns of a pair exchanged", (), ((CONSUME, "upper ? cvt_bf16x2(", "!upper ? cvt_bf16x2("),)),
    Bug("up with gate's bias", (), ((CONSUME, "__fadd_rn(d[3], bias.y)", "__fadd_rn(d[3], bias.x)"),)),
    Bug("a bias after rounding", (), ((CONSUME, "__fadd_rn(d[2 + j], bias[1])", f"__fadd_rn({ROUNDED}, bias[1])"),)),
    Bug("scales of another row", (), ((MULTIPLY, "second_scale_row * 16", "first_scale_row * 16"),)),
    Bug("rows of 32 before", (), ((MULTIPLY, "place / 2 % 4;", "place / 2 % 2;"),)),
)
