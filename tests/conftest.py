"""Fixtures shared by every test: the GPU marker, seeded inputs, fenced outputs and ragged groups.

What is not a fixture can be imported: `from conftest import RAGGED_CASES, GuardedOutput`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

# The emulator's matrix products are small: threads of BLAS would only take turns. Before anything imports numpy.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings

from padless.testing.guarded import GUARD_ROWS as GUARD_ROWS  # for the tests: from conftest import ..
from padless.testing.guarded import POISON as POISON
from padless.testing.guarded import GuardedOutput

settings.register_profile(
    "ci",
    deadline=None,
    max_examples=25,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
# `pytest --hypothesis-profile thorough` looks further, with new random examples every time.
settings.register_profile("thorough", parent=settings.get_profile("ci"), max_examples=500, derandomize=False)
settings.load_profile("ci")

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers share the cores; more threads would only take turns


# --- options and markers ---------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-slow", action="store_true", help="run the tests marked slow too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    for item in items:
        gpu = item.get_closest_marker("gpu")
        if gpu is not None:
            reason = missing_gpu(capability, gpu.kwargs.get("capability", (9, 0)))
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))
        if item.get_closest_marker("slow") and not config.getoption("--run-slow"):
            item.add_marker(pytest.mark.skip(reason="slow: run with --run-slow"))


def missing_gpu(present: tuple[int, int] | None, wanted: tuple[int, int] | None) -> str | None:
    """Why a test marked gpu cannot run on a device of capability `present`, or None where it can.

    sm_90a code runs on 9.0 and on nothing else, newer devices included, so `wanted` is matched exactly.
    """
    if present is None:
        return "needs a CUDA GPU and this machine has none"
    if wanted is not None and present != wanted:
        return (
            f"needs a CUDA GPU of compute capability {wanted[0]}.{wanted[1]}, found {present[0]}.{present[1]}"
        )
    return None


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For many small operations: threads would only take turns."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# --- inputs ----------------------------------------------------------------------------------------------


@pytest.fixture
def generator() -> torch.Generator:
    """A seeded CPU generator: draw on the CPU and move, so that every device sees the same input."""
    return torch.Generator().manual_seed(20240229)


@dataclass(frozen=True)
class RaggedCase:
    """One grouped problem. Rows past the last group belong to nobody (sum(sizes) <= M). M, N and K differ."""

    name: str
    sizes: tuple[int, ...]
    M: int
    N: int
    K: int

    @property
    def num_groups(self) -> int:
        return len(self.sizes)

    @property
    def valid_rows(self) -> int:
        return sum(self.sizes)

    def offs(self, device: str | torch.device = "cpu") -> torch.Tensor:
        """int32 cumulative ends, computed here so that group_offsets() has something to be compared with."""
        ends = torch.tensor(self.sizes, dtype=torch.int64).cumsum(0)
        return ends.to(dtype=torch.int32, device=device)


# Sizes around one 128-row tile, tails in N (not a multiple of 128) and in K (not a multiple of 128, of 64).
RAGGED_CASES = (
    RaggedCase("one_group", (192,), 192, 256, 384),
    RaggedCase("one_row_groups", (1, 1, 1, 1), 4, 136, 272),
    RaggedCase("around_a_tile", (127, 128, 129, 1), 385, 256, 144),
    RaggedCase("empty_first_and_last", (0, 65, 63, 0), 128, 72, 400),
    RaggedCase("empty_in_the_middle", (3, 0, 0, 126), 129, 384, 256),
    RaggedCase("all_in_one_group", (0, 0, 257, 0, 0), 257, 136, 128),
    RaggedCase("all_empty", (0, 0, 0), 5, 64, 128),
    RaggedCase("no_rows", (0, 0), 0, 64, 128),
    RaggedCase("rows_past_the_end", (31, 0, 97, 33), 200, 264, 176),
    RaggedCase("tiny_n_and_k", (2, 5, 0, 130), 137, 8, 16),
    RaggedCase("many_groups", tuple((7 * g) % 23 for g in range(33)), 368, 152, 304),
)


@pytest.fixture(params=RAGGED_CASES, ids=lambda case: case.name)
def ragged_case(request: pytest.FixtureRequest) -> RaggedCase:
    """Each of RAGGED_CASES in turn."""
    return request.param


# --- compiled kernels ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own_kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of this run's own: what is judged was compiled here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PADLESS_CACHE_DIR", str(tmp_path_factory.mktemp("kernels")))
        yield


# --- fenced outputs --------------------------------------------------------------------------------------


@pytest.fixture
def guarded_out() -> Callable[..., GuardedOutput]:
    """guarded_out(M, N, dtype, device="cpu") -> GuardedOutput."""
    return GuardedOutput
