"""Bugs planted in the choice of experts by logits inside of the decoding layer's launch (choose.cuh)."""

from __future__ import annotations

from support.moe_decode_logits import CHOOSE
from support.planted_bugs import Bug

OF_QUAD = "__fadd_rn(__fadd_rn(x[n], x[n + 1]), __fadd_rn(x[n + 2], x[n + 3]))"
OF_QUAD_IN_TURN = "__fadd_rn(__fadd_rn(__fadd_rn(x[n], x[n + 1]), x[n + 2]), x[n + 3])"
OF_QUADS = "for (int left = OF_LANE / 4; left > 1; left /= 2)"
IN_TURN = "for (int n = 1; n < OF_LANE / 4; ++n) x[0] = __fadd_rn(x[0], x[n]);"
QUOTIENT = "__fdiv_rn(decayed(__fsub_rn(logit, largest)), total);\n    }"
SCALED = "__fmul_rn(weight, rule.scaling_factor)"
SLOT_WEIGHT = "shared.slot_weight[token * p.top_k + lane]"


def one(name: str, old: str, new: str, *, quick: bool = False) -> Bug:
    return Bug(name, "", (CHOOSE, old, new), quick=quick)


BUGS = (
    one("the larger of equal ids of a lane", "is_first = one > first", "is_first = one >= first", quick=True),
    one("the larger of a lane's next equal ids", "is_second = one > second", "is_second = one >= second"),
    one("a lane's third best is not looked for", "if (__any_sync(ALL_LANES, left == 0)) find(rank);", ""),
    one("what was taken is taken again", "taken >> n & 1 ? ABSENT : rank[n]", "rank[n]"),
    Bug("the larger of equal ids of two lanes", "",
        (CHOOSE, "lane) : ~0u;", "lane) : 0;", CHOOSE, "__reduce_min_sync", "__reduce_max_sync")),
    one("-0 before 0, a NaN by its bits", "__float_as_int(__fadd_rn(x, 0.0f))", "__float_as_int(x)"),
    one("what a NaN chose has a weight", f"by == by ? {SCALED} : by", SCALED),
    one("lanes are added in another order", "distance = 1; distance < 32; distance *= 2",
        "distance = 16; distance > 0; distance /= 2", quick=True),
    one("values of a quad one after the other", OF_QUAD,
        "__fadd_rn(__fadd_rn(__fadd_rn(x[n], x[n + 1]), x[n + 2]), x[n + 3])"),
    one("quads one after the other", OF_QUADS, f"{IN_TURN} if (false) {OF_QUADS}"),
    one("a quotient rounded twice", QUOTIENT,
        "__fmul_rn(decayed(__fsub_rn(logit, largest)), __fdiv_rn(1.0f, total)); }"),
    one("nothing is added to the sum of sigmoids", "__fadd_rn(sum_of_lanes(weight), LEAST_SUM)",
        "sum_of_lanes(weight)"),
    one("the exponential goes on", "x < -87.0f ? 0.0f : x == x", "x == x"),
    one("what is chosen by weighs", "sigmoid_or_nan(logit) : 0.0f;", "value_of(chosen_by) : 0.0f;"),
    one("the bias does not choose", "if (biases != nullptr) {", "if (false) {"),
    one("a group's best alone", "__fadd_rn(value_of(first), value_of(next))", "value_of(first)"),
    one("a group's best twice", "lane == owner ? second : best", "best"),
    one("a group more", "n < p.rule.top_groups", "n <= p.rule.top_groups"),
    one("not scaled", SCALED, "weight"),
    one("the bias of another type", "load_values(bias, biases, bias_type,", "load_values(bias, biases, logits_type,"),
    one("weights of the next token", SLOT_WEIGHT, SLOT_WEIGHT.replace("token", "(token ^ (p.tokens > 1))"), quick=True),
    one("logits of the token before weigh", "first + id)", "max(0, first - p.experts) + id)"),
)  # fmt: skip
