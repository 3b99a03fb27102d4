"""The Triton kernels of `padless.nn` against their definitions in torch, bit for bit, on any device.

A GPU runs the cases directly, Triton's interpreter in a process of its own. Memory that kernels allocate is poisoned.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from support.interpreter import Cases, main
from support.training_quantizer_cases import offs_of, poisoned_memory
from support.triton_cases import awkward, bits

CASES = Cases()
case = CASES.add
SIZES = (3, 0, 34, 1)  # of 45 rows


def assert_bits(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """Every bit but those of a NaN."""
    assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride()), name
    got = got.cpu()
    assert torch.equal(got.isnan(), want.isnan()), f"{name}: other values are NaN"
    assert torch.equal(bits(got.nan_to_num(0.5)), bits(want.nan_to_num(0.5))), name


@case
def zeros_behind_the_last_group(device: str) -> None:
    from padless.nn.triton import rows

    for dtype in (torch.bfloat16, torch.float32):
        for ends, columns in ((SIZES, 530), ((45,), 16), ((0, 0), 512), ((32,), 40)):
            t = torch.full((45, columns), float("nan"), dtype=dtype, device=device)
            rows.zero_tail(t, offs_of(ends, device))
            end = sum(ends)
            assert t[:end].isnan().all()
            assert (t[end:] == 0).all()
            assert torch.equal(bits(t[end:].cpu()), bits(torch.zeros(45 - end, columns, dtype=dtype)))


@case
def decoded_rows(device: str) -> None:
    """Every code at every scale of a block, and values with NaN."""
    from padless import FP8_BLOCK, layouts, quantize
    from padless.nn import rows as definition
    from padless.nn.triton import rows

    codes = torch.arange(256, dtype=torch.uint8)[None].repeat(5, 1).view(torch.float8_e4m3fn)
    scale = layouts.to_mn_major(torch.rand(5, 2) * torch.tensor([[1e-30], [1e-3], [1.0], [3e4], [1e36]]))
    x = quantize(awkward((67, 272), torch.bfloat16, 3), FP8_BLOCK)
    for data, of_blocks in ((codes, scale), (x.data, x.scale)):
        want = definition.dequantize(data, of_blocks)
        there = layouts.to_mn_major(of_blocks.contiguous().to(device))
        with poisoned_memory():
            got = rows.dequantize(data.to(device), there)
        assert_bits("decoded", got, want)


@case
def slots_and_rows(device: str) -> None:
    from padless.moe import slots as definition
    from padless.moe import twins
    from padless.moe.triton import slots

    for tokens, top_k in ((1, 1), (37, 3), (300, 2)):
        g = torch.Generator().manual_seed(tokens)
        ids = torch.randint(-1, 6, (tokens, top_k), generator=g)
        inverse = twins.route(ids, 5)[2]
        values = torch.randn(tokens, top_k, generator=g)
        there = inverse.to(device)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            with poisoned_memory():
                by_row = slots.slots_to_rows(values.to(device, dtype), there)
                by_slot = slots.rows_to_slots(values.flatten().to(device), there, dtype)
            assert_bits("rows", by_row, definition.slots_to_rows(values.to(dtype), inverse))
            assert_bits("slots", by_slot, definition.rows_to_slots(values.flatten(), inverse, dtype))
            assert (by_slot.cpu()[inverse < 0] == 0).all()


@case
def swiglu_backward(device: str) -> None:
    from padless.nn import rows as definition
    from padless.nn.triton import swiglu

    offs = offs_of(SIZES, "cpu")
    for seed, (gate_up, columns, dtype) in enumerate(
        (
            ("concatenated", 144, torch.bfloat16),
            ("concatenated", 256, torch.float32),
            ("interleaved", 160, torch.bfloat16),
            ("interleaved", 128, torch.float16),
        )
    ):
        dh, z = awkward((45, columns), dtype, seed), awkward((45, 2 * columns), dtype, seed + 9)
        prob = torch.rand(45, generator=torch.Generator().manual_seed(seed))
        want = definition.swiglu_backward(dh, z, offs, prob, gate_up)
        with poisoned_memory():
            got = swiglu.swiglu_backward(dh.to(device), z.to(device), offs.to(device), prob.to(device), gate_up)
        for name, one, other in zip(("dz", "h", "dprob"), got, want, strict=True):
            assert_bits(f"{name}, {gate_up}, {columns} columns of {dtype}", one, other)
        assert (got[2][38:] == 0).all()


@case
def activation_gradients(device: str) -> None:
    from padless.moe.activation import Activation
    from padless.nn.lora import tokens as definition
    from padless.nn.triton import activation as kernels

    for seed, (dtype, of) in enumerate(
        (
            (torch.bfloat16, Activation()),
            (torch.bfloat16, Activation(gate_up="alternating", alpha=1.702, limit=0.5, up_offset=1.0)),
            (torch.float32, Activation(gate_up="interleaved", limit=0.25)),
            (torch.bfloat16, Activation(kind="geglu", up_offset=0.5)),
            (torch.bfloat16, Activation(kind="relu2")),
            (torch.float16, Activation(kind="gelu")),
            (torch.bfloat16, Activation(kind="silu")),
        )
    ):
        columns = 576
        dout = awkward((7, columns), dtype, seed)
        h = awkward((7, columns * (2 if of.is_gated else 1)), dtype, seed + 20)
        want = definition.activation_gradient(dout, h, of)
        with poisoned_memory():
            got = kernels.activation_gradient(dout.to(device), h.to(device), of)
        assert_bits(f"{of} of {dtype}", got, want)


@case
def dequantized_weights(device: str) -> None:
    """Every code and scale, layouts, a global scale of each weight and of all."""
    from padless import MXFP4, MXFP8, MXFP8_E5M2, NVFP4, BlockScaledTensor, dequantize, layouts
    from padless.nn.triton import dequantize as kernels

    g = torch.Generator().manual_seed(2)
    for fmt, n, k in ((MXFP8, 5, 288), (MXFP8_E5M2, 3, 256), (MXFP4, 130, 96), (NVFP4, 17, 272)):

        def drawn(*shape: int) -> torch.Tensor:
            return torch.randint(0, 256, shape, dtype=torch.uint8, generator=g)

        data = drawn(3, n, k // fmt.codes_per_byte)
        data = data.view(fmt.data_dtype)
        scale = drawn(3, n, -(-k // fmt.block_k)).view(fmt.scale_dtype)
        factors = [None] if fmt != NVFP4 else [torch.tensor(0.3), torch.tensor([0.3, 1.7, 1e-20])]
        for factor in factors:
            for layout in ("plain", "blocked"):
                given = scale if layout == "plain" else layouts.to_blocked(scale)
                weights = BlockScaledTensor(data, given, fmt, factor, layout)
                with poisoned_memory():
                    got = kernels.dequantized_weights(weights.to(device))
                assert_bits(f"{fmt.name}, {layout}", got, dequantize(weights, torch.bfloat16))


@case
def lifted_rows(device: str) -> None:
    """Quantized in one pass as `lift` and `quantize` do, up to gradients of 2^67 and down to subnormals."""
    from padless import FP8_BLOCK, quantize
    from padless.quantization.lifting import LIFT, lift
    from padless.quantization.triton.fp8_block import fp8_block

    for seed, dtype in enumerate((torch.bfloat16, torch.float32, torch.float16)):
        x = awkward((9, 300), dtype, seed)
        x = torch.where(x.float().abs() < 2.0**67, x, 0.5)  # as its text says; NaN too
        want = quantize(lift(x), FP8_BLOCK)
        with poisoned_memory():
            got = fp8_block(x.to(device), "activation", "mn", factor=LIFT)
        assert torch.equal(got.data.view(torch.uint8).cpu(), want.data.view(torch.uint8)), dtype
        assert_bits(f"scales of {dtype}", got.scale, want.scale)


@case
def rows_of_some_groups(device: str) -> None:
    from padless.nn import rows as definition
    from padless.nn.triton import rows

    t, offs = torch.randn(45, 530), offs_of(SIZES, "cpu")
    for groups in (slice(0, 2), slice(2, 4), slice(1, 2), slice(0, 4)):
        start, end = (b.to(device) for b in definition._bounds(offs, groups))
        there = slice(int(start), int(end))
        front = rows.moved(t.to(device), torch.full_like(t, float("nan"), device=device), start, end, forth=True)
        assert_bits("front", front[: int(end - start)], t[there])
        assert front[int(end - start) :].isnan().all()
        out = torch.full_like(t, 7.0, device=device)
        rows.moved(front, out, start, end, forth=False)
        assert_bits("back", out[there], t[there])
        out[there] = 7.0
        assert (out == 7.0).all()
        back, twin = definition.groups_to_front(t, offs, groups), torch.full_like(t, 7.0)
        assert_bits("the twin's front", back[: int(end - start)], t[there])
        definition.groups_from_front(back, twin, offs, groups)
        assert torch.equal(twin[there], t[there])
        twin[there] = 7.0
        assert (twin == 7.0).all()


@case
def pairs_of_adapters(device: str) -> None:
    from padless.nn.lora import low_rank
    from padless.nn.triton import low_rank as kernels

    g = torch.Generator().manual_seed(6)
    for dtype, of in ((torch.int64, torch.int32), (torch.int32, torch.int64)):
        ids, chosen = (torch.randint(-2, 7, s, generator=g, dtype=d) for s, d in (((400, 3), dtype), ((400,), of)))
        want = low_rank.adapter_pairs(ids, chosen, 5, 4)
        assert set(want.flatten().tolist()) == set(range(-1, 25))
        with poisoned_memory():
            got = kernels.adapter_pairs(ids.to(device), chosen.to(device), 5, 4)
        assert torch.equal(got.cpu(), want)


@case
def low_rank_products(device: str) -> None:
    """Of many groups and few, more adapters than a launch takes, transposed factors; against float64, row by row, and
    a row has the same bits whatever rows are around it.
    """
    from padless.nn.lora import low_rank
    from padless.nn.triton import low_rank as kernels

    g = torch.Generator().manual_seed(4)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g).bfloat16()

    for rank, count, sizes, k, n, dtype in (
        (3, 1, (0, 1, 40, 0), 136, 264, torch.bfloat16),
        (16, 2, (5, 0, 3, 0, 0, 9, 2, 1, 1), 128, 40, torch.float32),
        (20, 9, (1, 0, 2, 0, 0, 3, 0, 0, 0, 4) * 2, 64, 16, torch.bfloat16),
    ):
        per_expert = count + (len(sizes) % (count + 1) == 0)
        offs = offs_of(sizes, "cpu")
        experts, rows = len(sizes) // per_expert, drawn(sum(sizes) + 3, k)
        a = [drawn(experts, k, rank).mT.to(dtype) for _ in range(count)]
        b = [drawn(experts, n, rank).to(dtype) for _ in range(count)]
        added = drawn(rows.shape[0], n)
        there = [t.to(device) for t in (rows, offs, added)]
        on_device = [[t.to(device) for t in factors] for factors in (a, b)]
        found = {}
        with poisoned_memory():
            found["twin"] = both(low_rank.down, low_rank.up, [rows, offs, added], a, b, per_expert)
            width = partial(kernels.low_rank_down, width=low_rank.width_of(rank))
            found["kernel"] = both(width, kernels.low_rank_up, there, *on_device, per_expert)
        for name, results in found.items():
            t, out, alone = (x.cpu() for x in results)
            assert_bits(f"{name}: rows alone", alone, out[-8:-3])
            row = 0
            for group, size in enumerate(sizes):
                expert, adapter = divmod(group, per_expert)
                here = slice(row, row + size)
                row += size
                if adapter == count:
                    assert_bits(f"{name}: without an adapter", out[here], added[here])
                    continue
                want_t = rows[here].double() @ a[adapter][expert].bfloat16().double().T
                assert (t[here, rank:] == 0).all()
                close(t[here, :rank], want_t, rows[here], a[adapter][expert])
                of_t = t[here, :rank].double() @ b[adapter][expert].bfloat16().double().T
                close(out[here], added[here].double() + 0.5 * of_t, t[here, :rank], b[adapter][expert])
            assert_bits(f"{name}: behind the groups", out[row:], added[row:])


@case
def rows_and_factors_far_apart(device: str) -> None:
    """Rows in each 16th of which an offset of 32 bits ends, and a factor that is longer than those reach."""
    from padless.nn.lora import low_rank
    from padless.nn.triton import low_rank as kernels

    apart = 2**31 // 15 + 1
    rows = torch.empty(17 * apart, dtype=torch.bfloat16, device=device).as_strided((17, 32), (apart, 1))
    rows.copy_(torch.randn((17, 32), generator=torch.Generator().manual_seed(5)))
    a = [torch.ones((1, 16, 32), dtype=torch.bfloat16, device=device)]
    offs = offs_of((17,), device)
    got = kernels.low_rank_down(rows, a, offs, 1, 1.0, 16)
    assert_bits("rows far apart", got, low_rank.down(rows.cpu().contiguous(), [t.cpu() for t in a], offs.cpu(), 1, 1.0))
    for strides, is_known in (((64, 1, 2**25), True), ((1, 2**27, 1), False), ((1, 1, 2**26), False)):
        factor = torch.empty_strided((2, 16, 32), strides, dtype=torch.bfloat16, device="meta")
        (given,) = kernels.launches_of([factor], 2, 1)
        assert given.is_known == is_known, strides
        assert is_known or given.factors[0].is_contiguous()


@case
def activated_sums(device: str) -> None:
    """The activation of what is added, in every arrangement, in bfloat16 and FP8_BLOCK: the bits of two passes."""
    from padless import FP8_BLOCK
    from padless.moe import Activation
    from padless.moe.triton.quantize_rows import quantize_rows
    from padless.nn.lora import low_rank
    from padless.nn.triton import low_rank as kernels

    g = torch.Generator().manual_seed(9)
    of_gpt_oss = {"alpha": 1.702, "limit": 2.0, "up_offset": 1.0}
    for activation, rank, count, sizes, columns in (
        (Activation("swiglu"), 16, 1, (0, 1, 40, 0), 200),
        (Activation("swiglu", "alternating", **of_gpt_oss), 5, 2, (5, 0, 3, 0, 0, 9), 128),
        (Activation("geglu", "interleaved"), 20, 1, (3, 2), 96),
    ):
        per_expert = count + (len(sizes) % (count + 1) == 0)
        offs, m = offs_of(sizes, "cpu"), sum(sizes) + 3
        experts = len(sizes) // per_expert
        b = [torch.randn(experts, 2 * columns, rank, generator=g).bfloat16() for _ in range(count)]
        assert low_rank.activates_up(activation, b)
        t = torch.randn(m, low_rank.width_of(rank), generator=g).bfloat16()
        added = torch.randn(m, 2 * columns, generator=g).bfloat16()
        there = (t.to(device), [f.to(device) for f in b], offs.to(device), per_expert, 0.5, added.to(device))
        with poisoned_memory():
            h = kernels.low_rank_up(*there)
            want = quantize_rows(h, FP8_BLOCK, activation=activation)
            want_values, _ = quantize_rows(h, None, activation=activation)
            values, codes, scale = kernels.low_rank_up_activated(*there, activation, True)
            alone, nothing, _ = kernels.low_rank_up_activated(*there, activation, False)
        assert nothing is None
        assert_bits("values", values, want_values.cpu())
        assert_bits("values without codes", alone, want_values.cpu())
        assert_bits("codes", codes, want[0].view(torch.uint8).cpu())
        assert_bits("scales", scale, want[1].cpu())
        ld = scale.stride(1)
        padding = scale.as_strided((ld, scale.shape[1]), (1, ld))[m:]
        assert not bool(padding.any())


@case
def slots_that_look_adapters_up(device: str) -> None:
    """They have the bits of rows in groups of (expert, adapter): slots of no expert and tokens of no adapter too."""
    from padless.moe import Activation, twins
    from padless.nn.lora import looked_up as definition
    from padless.nn.lora import low_rank
    from padless.nn.triton import looked_up
    from padless.nn.triton import low_rank as kernels

    g = torch.Generator().manual_seed(11)
    of_gpt_oss = {"alpha": 1.702, "limit": 2.0, "up_offset": 1.0}

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g).bfloat16()

    for activation, top_k, rank, k, columns, dtype, out in (
        (Activation("swiglu"), 2, 16, 136, 128, torch.bfloat16, torch.bfloat16),
        (Activation("swiglu", "alternating", **of_gpt_oss), 3, 5, 272, 200, torch.float32, torch.float32),
        (Activation("geglu", "interleaved"), 1, 40, 64, 96, torch.bfloat16, torch.float16),
    ):
        tokens, experts, count, h = 9, 3, 2, 144
        chosen = torch.tensor([-1, 0, 1, 2, 1, 0, 7, -9, 1], dtype=torch.int32 if top_k == 3 else torch.int64)
        ids = torch.randint(-1, experts + 1, (tokens, top_k), generator=g)
        a13, b13, a2, b2 = (
            [drawn(experts, *shape).to(dtype) for _ in range(count)]
            for shape in ((rank, k), (2 * columns, rank), (rank, columns), (h, rank))
        )
        added, y = drawn(tokens * top_k, 2 * columns), drawn(tokens * top_k, h)
        x, weights, b2 = (
            drawn(tokens, k),
            drawn(tokens, top_k),
            [f * 2**-8 for f in b2],
        )  # so that float16 holds the sums
        shared = drawn(tokens, h) if top_k == 2 else None
        inverse = twins.route(ids, experts)[2]
        rows = torch.where(inverse < 0, -1 - inverse, inverse).flatten().long()
        there = lambda *given: [t.to(device) if isinstance(t, torch.Tensor) else t for t in given]  # noqa: E731
        factors = [[f.to(device) for f in fs] for fs in (a13, b13, a2, b2)]
        slots = looked_up.Slots(*there(ids, chosen, inverse))
        with poisoned_memory():
            t = looked_up.down(x.to(device), factors[0], slots._replace(inverse=None), low_rank.width_of(rank))
            values, codes, scale = looked_up.up_activated(t, factors[1], slots, 0.5, added.to(device), activation, True)
            alone, nothing, _ = looked_up.up_activated(t, factors[1], slots, 0.5, added.to(device), activation, False)
            t2 = looked_up.down(values, factors[2], slots, low_rank.width_of(rank))
            z = looked_up.combined(t2, factors[3], slots, 0.5, *there(y, weights, shared), out)
            assert nothing is None
            # The same by pairs, whose rows are in another order.
            pairs = low_rank.adapter_pairs(ids, chosen, experts, count)
            ends, pair_tokens, of_pairs = twins.route(pairs, experts * (count + 1))
            back = torch.where(of_pairs < 0, -1 - of_pairs, of_pairs).flatten().long()  # the row of each slot
            order = back.argsort()  # the slot of each row
            given = (ends.to(device), count + 1)
            want_t = kernels.low_rank_down(x.to(device), factors[0], *given, 1.0, t.shape[1], pair_tokens.to(device))
            in_pairs = added[rows[order]].to(device)
            want = kernels.low_rank_up_activated(want_t, factors[1], *given, 0.5, in_pairs, activation, True)
            want_t2 = kernels.low_rank_down(want[0], factors[2], *given, 1.0, t2.shape[1])
            want_y = kernels.low_rank_up(want_t2, factors[3], *given, 0.5, y[rows[order]].to(device))
        has = ((ids >= 0) & (ids < experts) & ((chosen >= 0) & (chosen < count))[:, None]).flatten()
        for name, got, by_pair in (("t", t, want_t), ("t of the second", t2, want_t2)):
            assert_bits(name, got.cpu()[has], by_pair.cpu()[back][has])
        for name, got, by_pair in (("values", values, want[0]), ("codes", codes, want[1]), ("scales", scale, want[2])):
            assert_bits(name, got.cpu()[rows].contiguous(), by_pair.cpu()[back].contiguous())
        assert_bits("values without codes", alone, values.cpu())
        sums = twins.combine(want_y.cpu(), of_pairs, weights, shared, out)
        assert_bits("the sum of a token", z, sums)
        # The definitions, of the same t, but for the order of its sums.
        given = (ids, chosen, inverse, 0.5)
        of = (activation.kind, activation.gate_up, activation.alpha, activation.limit, activation.up_offset, "BF16")
        for name, got, found in (
            ("t", t[has], definition.down(x, a13, ids, chosen, None)[has]),
            ("t of the second", t2[has], definition.down(values.cpu(), a2, ids, chosen, inverse)[has]),
            ("values", values, definition.up_activated(t.cpu(), b13, *given, added, *of)[0]),
            ("the sum", z, definition.combined(t2.cpu(), b2, *given, y, weights, shared, out)),
        ):
            far = (got.cpu().float() - found.float()).abs().max()
            assert far <= 2**-6 * found.float().abs().max(), f"{name}: {far}"


def both(down: Any, up: Any, given: list[torch.Tensor], a: Any, b: Any, per_expert: int) -> tuple[torch.Tensor, ...]:
    """The rows between both products, the result, and that of five rows of the last groups by themselves."""
    rows, offs, added = given
    t = down(rows, a, offs, per_expert, 1.0)
    order = torch.arange(rows.shape[0] - 1, -1, -1, dtype=torch.int32, device=rows.device)
    by_token = down(rows[order.long()], a, offs, per_expert, 1.0, tokens=order)
    row, count = torch.arange(rows.shape[0], device=rows.device), len(a)
    groups = torch.searchsorted(offs.long(), row, right=True)
    computed = (groups < len(offs)) & (groups % per_expert < count)
    assert_bits("rows of tokens", by_token[computed], t[computed].cpu())
    few = (offs - (int(offs[-1]) - 5)).clamp(min=0)
    part = slice(int(offs[-1]) - 5, int(offs[-1]))
    t_few = down(rows[part], a, few, per_expert, 1.0)
    return t, up(t, b, offs, per_expert, 0.5, added), up(t_few, b, few, per_expert, 0.5, added[part])


def close(got: torch.Tensor, want: torch.Tensor, x: torch.Tensor, factor: torch.Tensor) -> None:
    """Rounded to bfloat16, sums of K products x * factor in float32 of which no order adds more than K roundings."""
    size = x.double().norm(dim=1)[:, None] * factor.double().norm(dim=1)[None, :]
    assert ((got.double() - want).abs() <= want.abs() * 2**-8 + size * (x.shape[1] + 2) * 2**-24).all()


@case
def rows_that_there_are_not(device: str) -> None:
    """Of slots and tokens that name some: they lead nowhere, and what the others have is right."""
    from padless.moe import Activation, twins
    from padless.moe.triton import slots as of_slots
    from padless.nn.triton import looked_up
    from padless.nn.triton import low_rank as kernels
    from padless.testing.guarded import guarded_memory
    from padless.verify.fuzz.layers import named_rows, strayed
    from padless.verify.fuzz.place import place_of

    g, place = torch.Generator().manual_seed(12), place_of("reference")

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g).bfloat16().to(device)

    ids, chosen = torch.randint(-1, 4, (9, 3), generator=g), torch.randint(-1, 2, (9,), generator=g)
    has_factor = ((ids >= 0) & (ids < 3) & (chosen == 0)[:, None]).flatten()
    inverse, right_tokens = twins.route(ids, 3)[2], (torch.arange(27) % 9).int()
    wild, stays = strayed(inverse, 27, place, 3)
    tokens, known = strayed(right_tokens, 9, place, 2)
    here, strange = (has_factor & of for of in (stays.flatten(), ~stays.flatten()))
    assert all(t.any() for t in (wild >= 27, tokens >= 9, here, strange))
    ids, chosen = ids.to(device), chosen.to(device)
    a, b, b2 = [drawn(3, 16, 136)], [drawn(3, 256, 16)], [drawn(3, 144, 16)]
    t, weights, offs = drawn(27, 16), drawn(9, 3), offs_of((9, 9, 9), device)
    given = (drawn(27, 136), drawn(27, 256), drawn(27, 144), drawn(9, 136), drawn(27).float())

    def results(inverse: torch.Tensor, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """Among random bytes, as what they read is."""
        rows, added, y, few, of_rows = (torch.empty(x.shape, dtype=x.dtype, device=device).copy_(x) for x in given)
        inverse, tokens = inverse.to(device), tokens.to(device)
        slots = looked_up.Slots(ids, chosen, inverse)
        values, codes, scale = looked_up.up_activated(t, b, slots, 0.5, added, Activation("swiglu"), True)
        assert codes is not None
        assert scale is not None
        return {
            "by row": of_slots.slots_to_rows(weights, inverse),
            "by slot": of_slots.rows_to_slots(of_rows, inverse, torch.float32),
            "t of slots": looked_up.down(rows, a, slots, 16),
            "values": values,
            "codes": codes,
            "scales": scale,
            "sum": looked_up.combined(t, b2, slots, 0.5, y, weights, None, torch.float32),
            "t of tokens": kernels.low_rank_down(few, a, offs, 1, 1.0, 16, tokens),
        }

    with guarded_memory() as changed:
        got = results(wild, tokens)
    assert not changed()
    want = results(torch.where(stays | (inverse < 0), inverse, -1 - inverse), right_tokens)
    named = named_rows(inverse, stays)
    for name, kept in {
        "by row": named, "by slot": None, "t of slots": here, "values": named, "codes": named, "scales": named,
        "sum": None, "t of tokens": known,
    }.items():  # fmt: skip
        mine, others = (x[name].cpu() if kept is None else x[name].cpu()[kept].contiguous() for x in (got, want))
        assert_bits(name, mine, others)
    assert not got["t of slots"].cpu()[strange].any()
    assert not got["t of tokens"].cpu()[~known].any()


if __name__ == "__main__":
    main(CASES)
