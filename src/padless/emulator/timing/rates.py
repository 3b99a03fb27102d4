"""Rates of the chips that the clock knows: one table a chip, every number with its mark and its source.

Cycles are those of a multiprocessor (SM) unless a name says otherwise. Marks: "measured" by the source, "fitted" to
the source's raw data, "inferred" by arithmetic on published numbers, "stated" with no measurement to be seen, "other
chip" for a measurement on a near relative. Nothing here belongs to a kernel: a number that only one kernel needs has no
place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

MARKS = ("measured", "fitted", "inferred", "stated", "other chip")


@dataclass(frozen=True)
class Rate:
    """One number: ``value`` in ``unit``, how it is known (``mark``, of MARKS) and from where (``source``)."""

    value: float
    unit: str
    mark: str
    source: str

    def __post_init__(self) -> None:
        if self.mark not in MARKS:
            raise ValueError(f"mark is {self.mark!r}, allowed are {', '.join(MARKS)}")


class _Asked(dict[str, Rate]):
    """Rates by name, and the names that were looked up."""

    def __init__(self, rates: Mapping[str, Rate]) -> None:
        super().__init__(rates)
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> Rate:
        self.names.add(name)
        return super().__getitem__(name)


@dataclass(frozen=True)
class Chip:
    """A GPU. ``clocks_ghz``: the band in which its clock is seen, under load and in bursts."""

    name: str
    arch: str
    num_sms: int
    clocks_ghz: tuple[float, float]
    rates: Mapping[str, Rate]

    def __getitem__(self, name: str) -> float:
        return self.rates[name].value

    def counting(self) -> Chip:
        """The chip, with rates that remember which of them were asked for (`asked`)."""
        return replace(self, rates=_Asked(self.rates))

    def asked(self) -> dict[str, Rate]:
        """The rates that a run took, of a chip that counts them."""
        return {name: self.rates[name] for name in getattr(self.rates, "names", self.rates)}

    def changed(self, mark: str, source: str, **values: float) -> Chip:
        """The chip with other values of some rates, for a fit or a what-if."""
        rates = dict(self.rates)
        for name, value in values.items():
            rates[name] = replace(rates[name], value=value, mark=mark, source=source)
        return replace(self, rates=rates)


_FGS = "FlashGPU-Sim, configuration SM90_H200 (MICRO 2026)"
_SA = "SemiAnalysisAI/microbench-blackwell, raw data of a B200 (Apache-2.0)"
_LOOPS = f"{_SA}, a third of its main loops of CUTLASS"
_LADDER = "twelve published MXFP8 kernels at 2048 and 8192 (Vega-Myhre)"
_FB = "facebookexperimental/triton, latency model for B200"
_QR = "ademeure/QuickRunCUDA, catalogue of a B300"
_PL = "this project's records of an H200"
_UNITS = "`padless bench units` on an H200, 2026-11-22"
_CALLS = f"{_PL}: 5 dense shapes and 120 small problems with 3 tiles"
_COUNTED = "clocks of three kinds of tiles at three problems, counted on an H200, 2026-11-22"
_ISSUE = {
    "issue_per_clk": Rate(1, "warp-instructions/clk/sub-partition", "stated", "CUDA programming guide"),
    "alu_latency": Rate(4.5, "clk", "inferred", "dependent issue of 4 to 5 cycles since Volta"),
    "shared_latency": Rate(29, "clk", "measured", _FGS),
    "shuffle_latency": Rate(24, "clk", "measured", _QR),
    "shared_bytes_per_clk": Rate(128, "B/clk", "measured", _FGS),
    "branch": Rate(12, "clk, a loop's back edge", "measured", _FGS),
    "named_barrier": Rate(18, "clk from the last arrival to going on", "measured", _FGS),
    "proxy_fence": Rate(32, "clk", "measured", _FGS),
}

H200 = Chip(
    "H200",
    "sm_90a",
    132,
    (1.42, 1.98),
    {
        **_ISSUE,
        "tensor_bytes_per_clk": Rate(
            4084, "row x column x byte of K /clk", "measured", f"{_UNITS}; {_FGS}: N/2 clk an m64nNk32"
        ),
        "mma_sync_share": Rate(
            0.62, "of the tensor cores' rate by mma.sync", "measured", "arXiv 2402.13499, mean over types"
        ),
        "wgmma_issue": Rate(4, "clk", "measured", f"{_FGS}: 4 with A in shared memory, 9 to 10 in registers"),
        "wgmma_register_a": Rate(3.0, "clk more of a product with A in registers", "measured", _UNITS),
        "wgmma_wait": Rate(18.6, "clk from the last product to going on", "measured", _UNITS),
        "wgmma_shared_overlap": Rate(
            0.0,
            "share of a copy's bytes that the operands' reads wait for",
            "measured",
            f"{_UNITS}: 0.007, less than a run's repeats tell",
        ),
        "operand_slots": Rate(
            1.25,
            "issue slots a register operand of an arithmetic instruction while products run",
            "fitted",
            f"counted cycles of 128 x 128 tiles, 2026-11-22; {_FGS}: products take half of the registers' bandwidth",
        ),
        "operand_slots_alone": Rate(
            0.51,
            "issue slots a register operand of an arithmetic instruction while none run",
            "other chip",
            f"{_QR}: three distinct operands at 65% of the rate",
        ),
        "mbarrier_wait": Rate(43, "clk of a try_wait that succeeds", "measured", _FGS),
        "mbarrier_arrive": Rate(6, "clk", "measured", _FGS),
        "remote_arrive": Rate(
            210, "clk to the other CTA's barrier", "other chip", f"{_QR}: 207 to 223 a load of its memory"
        ),
        "cluster_barrier": Rate(190, "clk", "other chip", f"{_QR}: half of 370 to 395, arrival and wait"),
        "clock_read": Rate(33.3, "clk of a read of %clock", "measured", _UNITS),
        "divide_latency": Rate(174, "clk of a division of 32 bits, with its remainder", "measured", _UNITS),
        "tma_issue": Rate(75.3, "clk of the issuing thread", "measured", _UNITS),
        "tma_row": Rate(1.19, "clk a row of at most 128 B", "measured", _UNITS),
        "tma_latency": Rate(214, "clk from issue to the first bytes, from L2", "measured", _UNITS),
        "tma_descriptor": Rate(
            243, "clk more of a tensor map's first load, where no prefetch has brought the map", "measured", _UNITS
        ),
        "memory_latency": Rate(250, "clk more from memory than from L2", "measured", f"{_FGS}: 194 to 254"),
        "l2_feed": Rate(
            78.3, "B/clk into an SM, of all", "measured", f"{_UNITS}: all read the same; 35 where each has its own"
        ),
        "l2_feed_alone": Rate(107.9, "B/clk into an SM that loads alone", "measured", _UNITS),
        "global_latency": Rate(270, "clk of a load from L2", "measured", _FGS),
        "store_latency": Rate(600, "clk from issue to written", "inferred", "as a load"),
        "store_bytes_per_clk": Rate(32, "B/clk out of an SM", "inferred", "half of the feed"),
        "memory_gb_per_s": Rate(4540, "GB/s read", "measured", f"{_PL}: reads of 0.2 to 13 GB"),
        "memory_write_gb_per_s": Rate(
            4030, "GB/s written", "measured", f"{_PL}: copies of 0.2 to 13 GB, less their reads"
        ),
        "l2_mb": Rate(50, "MB", "stated", "NVIDIA H100 white paper"),
        "launch_ns": Rate(5250, "ns from event to event besides the tiles", "fitted", _CALLS),
        "full_load_ghz": Rate(2.0, "GHz with the tensor cores always busy and nothing moved", "fitted", _CALLS),
        "wide_power": Rate(
            2.36, "power of products of 16 bits, of those of 8", "fitted", f"{_PL}: NVFP4 x NVFP4 at prefill"
        ),
        "received_power": Rate(0.0261, "power of a B/clk into an SM, of the tensor cores'", "fitted", _COUNTED),
        "memory_power": Rate(0.00012, "of the limit a GB/s of memory", "fitted", _COUNTED),
        "memory_overlap": Rate(4, "exponent with which a round's times of tiles and of memory join", "fitted", _CALLS),
    },
)

B200 = Chip(
    "B200",
    "sm_100a",
    148,
    (1.58, 1.965),
    {
        **_ISSUE,
        "tensor_bytes_per_clk": Rate(
            8192, "row x column x byte of K /clk", "fitted", f"{_SA}: N/2 clk at M = 128, all kinds"
        ),
        "mma_sync_share": Rate(0.25, "of the tensor cores' rate by mma.sync", "inferred", "half of Hopper's a clock"),
        "mma_half_rows": Rate(0.5, "of the rate with 64 rows a CTA", "fitted", _SA),
        "mma_shared_bytes_per_clk": Rate(
            128, "B/clk of A and B read for products", "fitted", f"{_SA}: 32 + N/4 clk at M = 128"
        ),
        "mma_pair_extra": Rate(
            3, "clk of a pair's instruction that shared memory binds; a third of it with 64 rows a CTA", "fitted", _SA
        ),
        "mma_floor": Rate(18, "clk between instructions at least", "measured", f"{_SA}: pair, N = 64"),
        "mma_latency": Rate(104, "clk from the pipe's end to the barrier, one CTA, A in tensor memory", "fitted", _SA),
        "mma_latency_shared_a": Rate(16, "clk more with 64 rows of A in shared memory", "fitted", _SA),
        "mma_latency_pair": Rate(34, "clk more of a pair", "fitted", _SA),
        "mma_issue": Rate(12, "clk of the issuing thread", "inferred", f"{_FB}: 30 for a tile of 4"),
        "cp_bytes_per_clk": Rate(
            128,
            "B/clk of the tensor pipe for tcgen05.cp",
            "inferred",
            "Triton's Gluon example, GB300: NVFP4 against MXFP4 at 2 to 23 clk per 512 B",
        ),
        "tmem_ld_bytes_per_clk": Rate(64, "B/clk a warp", "measured", f"{_QR} 53 to 57, {_FB}"),
        "tmem_st_bytes_per_clk": Rate(256, "B/clk a warp", "inferred", f"{_FB}: 64 clk for 128 x 64"),
        "tmem_latency": Rate(50, "clk, idle", "inferred", _FB),
        "tmem_latency_busy": Rate(200, "clk behind products", "stated", "log of a public kernel for B200"),
        "tmem_wait": Rate(13, "clk", "stated", "tcgen05.wait alone"),
        "tmem_alloc": Rate(253, "clk", "stated", "tcgen05.alloc alone"),
        "operand_slots": Rate(0.0, "issue slots", "inferred", "sums are not in registers"),
        "operand_slots_alone": Rate(0.0, "issue slots", "inferred", "as above"),
        "mbarrier_wait": Rate(30, "clk", "measured", _FB),
        "mbarrier_arrive": Rate(27, "clk", "other chip", _QR),
        "remote_arrive": Rate(210, "clk", "other chip", _QR),
        "cluster_barrier": Rate(190, "clk", "other chip", _QR),
        "tma_issue": Rate(40, "clk", "measured", f"{_FB} 30, {_QR} 48"),
        "tma_row": Rate(1.55, "clk a row of at most 128 B", "fitted", _LOOPS),
        "clock_read": Rate(20, "clk", "inferred", "less than on an H200, 32"),
        "divide_latency": Rate(50, "clk of a division of 32 bits", "inferred", "its instructions alone"),
        "tma_latency": Rate(700, "clk", "fitted", f"{_SA}, main loops of CUTLASS"),
        "tma_descriptor": Rate(340, "clk more of a map's first load", "other chip", "an H200"),
        "memory_latency": Rate(500, "clk", "inferred", "800 to 900 in all"),
        "l2_feed": Rate(71, "B/clk into an SM, of all", "measured", f"{_QR}, {_SA} 56 to 58 when shared"),
        "global_latency": Rate(310, "clk", "measured", _QR),
        "store_latency": Rate(700, "clk", "inferred", "as a load"),
        "store_bytes_per_clk": Rate(24, "B/clk", "fitted", _LADDER),
        "local_lookups": Rate(
            2, "accesses of local memory one after the other between two barriers", "fitted", _LADDER
        ),
        "store_line": Rate(0.5, "clk a line of 128 B that an instruction's lanes store to", "fitted", _LADDER),
        "memory_gb_per_s": Rate(7220, "GB/s read", "measured", _SA),
        "memory_write_gb_per_s": Rate(7220, "GB/s written", "inferred", "as reads"),
        "l2_mb": Rate(126, "MB", "measured", _SA),
        "full_load_ghz": Rate(1.58, "GHz", "measured", "flashinfer, 1000 W, sustained attention"),
        "wide_power": Rate(1.0, "of products of 8 bits", "inferred", "as above"),
        "received_power": Rate(0.0, "of the tensor cores'", "inferred", "in what full_load_ghz was measured at"),
        "memory_power": Rate(0.0, "of the limit", "inferred", "as above"),
        "memory_overlap": Rate(4, "exponent", "inferred", "as on an H200"),
        "launch_ns": Rate(5000, "ns", "inferred", _QR),
        "row_ns": Rate(
            1700, "ns of a call among others of a stream, in place of a launch", "inferred", f"3.3 us less, as in {_PL}"
        ),
        "stage_floor": Rate(185, "clk a stage of a ring, however little it carries", "fitted", _LOOPS),
        "stream_bytes_per_clk": Rate(41, "B/clk of the operand with more rows, alone on the chip", "fitted", _LOOPS),
        "mma_least": Rate(44, "clk between products of a loop", "fitted", _LOOPS),
        "ring_latency": Rate(675, "clk of a round trip besides its load and products", "fitted", _LOOPS),
        "ring_load": Rate(1.5, "loads in a round trip", "fitted", _LOOPS),
        "ring_products": Rate(1.4, "stages' products in a round trip", "fitted", _LOOPS),
    },
)

CHIPS = {chip.name: chip for chip in (H200, B200)}


def chip_of(arch: str) -> Chip:
    """The chip that stands for an architecture ("sm_90a", "sm_100a"). ValueError for others."""
    for chip in CHIPS.values():
        if chip.arch == arch:
            return chip
    raise ValueError(f"target is {arch!r}, the clock knows {', '.join(c.arch for c in CHIPS.values())}")
