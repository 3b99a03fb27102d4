"""Bugs to plant in the "symm" backend's kernels, and the case that must find each.

As a program, in Triton's interpreter: plants one after the other and prints one JSON object, bug -> the end of the error
that its case gave, or null where the case passed.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import padless.distributed.triton as exchange
import padless.moe.triton as moe

# In the order of their imports.
MODULES = {
    "arithmetic": moe,
    **dict.fromkeys(("cells", "publish", "receive", "receive_few", "receive_gradients", "send_back"), exchange),
}


@dataclass(frozen=True)
class Bug:
    """case: of ep_symm_cases or ep_symm_regions. changes: module, text, other text, and so on; each text being there."""

    case: str
    changes: tuple[str, ...]

    @property
    def edits(self) -> list[tuple[str, str, str]]:
        return list(zip(self.changes[::3], self.changes[1::3], self.changes[2::3], strict=True))


HALF = "% 2).to(tl.int64)"
ONE_HALF = "% 1).to(tl.int64)"
BUGS = {
    "one half for all epochs": Bug("one_rank_ahead",
        ("publish", HALF, ONE_HALF, "receive", HALF, ONE_HALF, "receive_few", HALF, ONE_HALF)),
    "weights of the other epoch": Bug("two_ranks",
        ("receive", "weights_region + ids_half * R", "weights_region + 0 * R")),
    "scales of the other epoch": Bug("two_ranks", ("receive", "scales_region + half * R", "scales_region + 0 * R")),
    "scales of one source for all": Bug("two_ranks",
        ("publish", "((half * R + rank) * max_tokens", "((half * R + 0) * max_tokens")),
    "scales are placed past the capacity": Bug("capacity_of_scales",
        ("receive", "num_local_experts - 1), capacity) * there", "num_local_experts - 1), 1 << 30) * there")),
    "the first program places no scales": Bug("two_ranks",
        ("receive", "rows, first, programs, PLACED", "rows, first + 1, programs, PLACED")),
    "ids are cut to 32 bits": Bug("wrong_ids",
        ("publish", "tl.where(values < 0, -1, tl.minimum(values, num_experts)).to", "values.to")),
    "the first program signals": Bug("two_ranks", ("cells", "== programs - 1", "== 0")),
    "a rank that did not come was awaited": Bug("waits", ("cells", "+ COUNTER, there)", "+ COUNTER, 1)")),
    "what was awaited is taken for something else": Bug("two_ranks",
        ("cells", "there = tl.load(counters_ptr + AWAITED + COUNTER)", "there = tl.load(counters_ptr + AWAITED)")),
    "the other half is awaited": Bug("two_ranks",
        ("cells", "half = (epoch % HALVES)", "half = ((epoch + 1) % HALVES)")),
    "an abort is not passed on": Bug("waits",
        ("cells", "for peer in range(R):\n                there", "for peer in range(0):\n                there")),
    "the wrong rank is named": Bug("waits", ("cells", "axis=0).to(tl.int64) + 1", "axis=0).to(tl.int64)")),
    "rows are stored past the capacity": Bug("capacity",
        ("receive", "if (row >= 0) & (row < capacity):", "if row >= 0:")),
    "offs are not cut": Bug("capacity", ("receive", "tl.minimum(ends, capacity)", "ends")),
    "rows are stored past the capacity, few": Bug("capacity",
        ("receive_few", "tl.max((kept & (lane == j))", "tl.max((is_here & (lane == j))")),
    "one half for all epochs, few": Bug("one_rank_ahead", ("publish", HALF, ONE_HALF, "receive_few", HALF, ONE_HALF)),
    "one half for all sums": Bug("one_rank_ahead", ("send_back", "(epoch % HALVES)", "(epoch % 1)")),
    "one half for all values by slot": Bug("one_rank_ahead",
        ("send_back", "slots_region + first * TOP_K", "slots_region + 0 * first")),
    "signals of all sums in one cell": Bug("one_rank_ahead",
        ("send_back", "summed + half * R * 8", "summed + 0 * half")),
    "a half of rows of slots has a row a rank": Bug("halves",
        ("send_back", "ROWS: tl.constexpr = TOP_K if BY_SLOT else R", "ROWS: tl.constexpr = R")),
    "a half of sums has a row a slot": Bug("halves",
        ("send_back", "ROWS: tl.constexpr = TOP_K if BY_SLOT else R", "ROWS: tl.constexpr = TOP_K")),
    "values by slot past their half": Bug("halves", ("send_back", "first * TOP_K * 4,", "first * TOP_K * 8,")),
    "ids of more tokens than there are stay": Bug("two_ranks",
        ("publish", "tl.store(ids + at, values, mask=at < table)", "tl.store(ids + at, values, mask=at < count)")),
    "a rank that gave up says that its sums are there": Bug("sums_after_a_timeout",
        ("send_back", "(there == 1) & (gave_up == 0)", "there == 1")),
    "an abort is not looked at when all is there": Bug("sums_after_a_timeout",
        ("cells", "if abort != 0:", "if (abort != 0) & (missing != 0):")),
    "the first rank alone is told": Bug("two_ranks", ("cells", "values, mask=peer < R,", "values, mask=peer < 1,")),
    "equal experts in any order": Bug("two_ranks", ("receive_few", "* SLOTS + slot", "* SLOTS - slot")),
    "groups end where they begin": Bug("two_ranks", ("receive_few", "(group + 1) * SLOTS", "group * SLOTS")),
    "the first groups alone have ends": Bug("two_ranks",
        ("receive_few", "R * max_tokens) * LANES", "R * max_tokens) * 0")),
    "all tokens are the first": Bug("two_ranks",
        ("receive_few", "* max_tokens + token) * record_bytes", "* max_tokens) * record_bytes")),
    "rows of a rank that is not there, few": Bug("waits", ("receive_few", "R * table * there", "R * table")),
    "rows are not waited for": Bug("waits_for_rows",
        ("receive", "aborted, epoch, status_ptr, limit, R, CLOCK, POLLS)\n    for pair",
        "aborted, 0, status_ptr, limit, R, CLOCK, POLLS)\n    for pair")),
    "row 0 is no row": Bug("three_ranks", ("receive", "if (row >= 0) &", "if (row > 0) &")),
    "rows of a rank that is not there": Bug("waits", ("receive", "table * there", "table")),
    "gradients of the other half": Bug("gradients_in_fp8",
        ("receive_gradients", "x_region + (half", "x_region + (0 * half")),
    "gradients have their first block's scale": Bug("gradients_in_fp8",
        ("receive_gradients", "scales + block", "scales + 0 * block")),
    "gradients are not lifted": Bug("gradients_in_fp8",
        ("publish", ", other=0.0)) * LIFT", ", other=0.0))", "publish", "scale * (1 / LIFT)", "scale")),
    "gradients stay lifted": Bug("gradients_in_fp8", ("publish", "scale * (1 / LIFT)", "scale")),
    "gradients are not waited for": Bug("waits_for_gradients",
        ("receive_gradients", "aborted, epoch, status_ptr", "aborted, 0, status_ptr")),
    "row 0 has no gradient": Bug("gradients_in_fp8", ("receive_gradients", "if (row >= 0) &", "if (row > 0) &")),
    "subnormal codes of gradients": Bug("gradients_in_fp8",
        ("arithmetic", "magnitude << 7", "(magnitude + (magnitude < 8)) << 7")),
    "NaN of gradients is a number": Bug("gradients_in_fp8", ("arithmetic", "magnitude == 0x7F", "magnitude == 0xFF")),
    "negative gradients": Bug("gradients_in_fp8", ("arithmetic", "(bits & 0x80) << 8", "(bits & 0) << 8")),
    "sums are stored before the last were read": Bug("waits",
        ("send_back", "finished, aborted, epoch - 1, status_ptr", "finished, aborted, 0, status_ptr")),
    "slots are added from the last": Bug("order_of_sums",
        ("send_back", "tl.load(inverse_ptr + at + j)", "tl.load(inverse_ptr + at + TOP_K - 1 - j)")),
    "ranks are added from the last": Bug("order_of_sums",
        ("send_back", "for r in tl.static_range(R):", "for r in tl.static_range(R - 1, -1, -1):")),
    "sums without a rank": Bug("waits", ("send_back", "if there == 0:", "if there == 2:")),
    "values by slot go to the wrong rank": Bug("two_ranks",
        ("send_back", "buffer_of(pointers_ptr, source, slots_region", "buffer_of(pointers_ptr, rank, slots_region")),
}  # fmt: skip


def plant(bug: Bug | None, folder: str) -> None:
    """Imports the kernels anew, with the bug in them."""
    for name, package in MODULES.items():
        sys.modules.pop(f"{package.__name__}.{name}", None)
    for name, package in MODULES.items():
        source = Path(package.__path__[0], f"{name}.py").read_text()
        for module, text, other in () if bug is None else bug.edits:
            if module == name:
                assert source.count(text) >= 1, f"{text!r} is not in {name}.py"
                source = source.replace(text, other)
        path = Path(folder, f"{name}.py")
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(f"{package.__name__}.{name}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        setattr(package, name, module)


def find_all(only: list[str]) -> dict[str, str | None]:
    from support import ep_symm_cases, ep_symm_regions, interpreter

    cases = interpreter.Cases({**ep_symm_cases.CASES, **ep_symm_regions.CASES})
    found: dict[str, str | None] = {}
    for name, bug in BUGS.items():
        if only and name not in only:
            continue
        with tempfile.TemporaryDirectory() as folder:
            plant(bug, folder)
            error = interpreter.run(cases, [bug.case])[bug.case]
        found[name] = None if error is None else error.strip().splitlines()[-1][-200:]
    return found


if __name__ == "__main__":
    json.dump(find_all(sys.argv[1:]), sys.stdout, indent=1)
