"""What the calls of a profile's runtime are."""

from __future__ import annotations

import pytest

from nimble_viz.traces.events import is_launch, is_synchronisation


@pytest.mark.parametrize(
    ("name", "launch", "wait"),
    [
        ("cudaLaunchKernel", True, False),
        ("cudaMemcpyAsync", True, False),
        ("cudaMemcpy", False, True),
        ("cuMemcpyDtoH_v2", False, True),
        ("cuMemcpyDtoHAsync_v2", True, False),
        ("cudaStreamSynchronize", False, True),
        ("cudaMalloc", False, False),
        ("mylib::Synchronize", False, False),
    ],
)
def test_kinds_of_runtime_calls(name: str, launch: bool, wait: bool) -> None:
    assert (is_launch(name), is_synchronisation(name)) == (launch, wait)
