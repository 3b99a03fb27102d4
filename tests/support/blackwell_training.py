"""Runs a training step on a pretended B200: `python -m support.blackwell_training RECIPE [BUG]`.

Prints one JSON object: which of the output and the gradients have the bits of the same step on the CPU, whose products
run in the emulator one by one and whose passes are torch twins, and how far they are from it, relative to the largest
value; and the launches' kernels and kinds of reports.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

from support.blackwell_layer import kinds_of_reports, rolled, without_wait

COLUMNS, SCALES = "columns with a row of the group before", "scale tiles of the group before"


def main(name: str, bug: str = "") -> dict[str, Any]:
    """The step's record."""
    from padless.emulator.program.run import install

    session = install("B200", num_sms=2, say=lambda line: None)
    if bug.startswith("no wait in "):
        without_wait(bug.removeprefix("no wait in "))(session)
    import torch

    from padless.nn import RECIPES, experts_function, experts_of_rows, linear_function
    from padless.runtime.devices import backend_on_cpu

    draw = torch.Generator().manual_seed(0)
    sizes, h, i, capacity = (1, 0, 33, 40), 96, 64, 80  # six rows behind the last group
    offs = torch.tensor(sizes).cumsum(0).to(torch.int32)
    w13 = torch.randn(len(sizes), 2 * i, h, generator=draw) / h**0.5
    w2 = torch.randn(len(sizes), h, i, generator=draw) / i**0.5
    x, dout = (torch.randn(capacity, h, generator=draw) for _ in range(2))
    prob = torch.rand(capacity, generator=draw)

    def step(on_gpu: bool) -> dict[str, torch.Tensor]:
        made = {"x": x, "w13": w13, "w2": w2}
        leaves = {name: (t.bfloat16().cuda() if on_gpu else t.bfloat16()) for name, t in made.items()}
        leaves["prob"] = prob.cuda() if on_gpu else prob.clone()
        for t in leaves.values():
            t.requires_grad_()
        there = (offs.cuda(), dout.bfloat16().cuda()) if on_gpu else (offs, dout.bfloat16())
        out = experts_of_rows(leaves["x"], there[0], leaves["w13"], leaves["w2"], leaves["prob"], recipe=RECIPES[name])
        out.backward(there[1])
        found = {"out": out, **{name: t.grad for name, t in leaves.items()}}
        return {name: t.detach().cpu() for name, t in found.items() if t is not None}

    with backend_on_cpu("emulator:sm_100a"):
        want = step(False)
    # Inside of autograd's engine nothing pretends, and what it hands out has lost the mark of a pretended GPU.
    right, pretended = experts_function._gradients, torch.overrides._get_current_function_mode()

    def marked(t: Any) -> Any:
        if t is not None:
            t._padless_on_gpu = True
        return t

    def gradients(ctx: Any, dout: torch.Tensor) -> Any:
        names = ("plan", "needs_input_grad", "next_functions", "dtypes", "weights", "facts")
        facts = {name: getattr(ctx, name) for name in names}
        with pretended:
            saved = [marked(t) for t in ctx.saved_tensors]
            return right(SimpleNamespace(**facts, saved_tensors=saved), marked(dout))

    experts_function._gradients = gradients
    if bug == COLUMNS:
        both = linear_function.mx_rows_and_columns
        linear_function.mx_rows_and_columns = lambda x, offs, rows: both(x, offs - 1, rows)
    if bug == SCALES:
        product = experts_function.product
        experts_function.product = lambda a, w, *arguments, **options: product(a, rolled(w), *arguments, **options)
    got = step(True)
    launches = [(launched.name, kinds_of_reports(launched)) for launched in session.launches]
    equal = {name: torch.equal(got[name], t) and bool(t.isfinite().all()) for name, t in want.items()}
    off = {name: float((got[name].float() - t.float()).abs().max() / t.abs().max()) for name, t in want.items()}
    return {"equal": equal, "off": off, "launches": launches, "refused": session.refused}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
