"""Fixtures shared by every test: the GPU marker, seeded inputs, guarded outputs and ragged groups.

What is not a fixture can be imported: `from support import slow_share
from support.ragged import RAGGED_CASES, GuardedOutput`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

# The emulator's matrix products are small: threads of BLAS would only take turns. Before anything imports numpy.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings

from support import run_record, slow_share
from support.ragged import RAGGED_CASES, GuardedOutput, RaggedCase, missing_gpu

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
    slow_share.add_options(parser)
    run_record.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    slow_share.configure(config)
    run_record.configure(config)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    for item in items:
        gpu = item.get_closest_marker("gpu")
        if gpu is not None:
            reason = missing_gpu(capability, gpu.kwargs.get("capability", (9, 0)))
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


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


@pytest.fixture(params=RAGGED_CASES, ids=lambda case: case.name)
def ragged_case(request: pytest.FixtureRequest) -> RaggedCase:
    """Each of RAGGED_CASES in turn."""
    return request.param


@pytest.fixture
def gpu() -> Iterator[Any]:
    """A GPU that is pretended: a `support.hopper.Gpu`, which notes what is launched."""
    from support import hopper  # needs Triton

    with hopper.pretended() as found:
        yield found


# --- compiled kernels ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own_kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of this run's own: what is judged was compiled here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PADLESS_CACHE_DIR", str(tmp_path_factory.mktemp("kernels")))
        yield


# --- guarded outputs --------------------------------------------------------------------------------------


@pytest.fixture
def guarded_out() -> Callable[..., GuardedOutput]:
    """guarded_out(M, N, dtype, device="cpu") -> GuardedOutput."""
    return GuardedOutput
