"""The environment stamp: complete on any machine, and never an exception."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

from nimble_core.profiling import machine
from nimble_core.profiling.machine import GpuFacts, cpu_name, environment, finish, gpu_facts


def test_stamp_of_this_machine() -> None:
    stamp = environment("cpu")
    assert stamp.device == "cpu"
    assert stamp.device_name == stamp.host_cpu != ""
    assert 1 <= stamp.cores <= (os.cpu_count() or 1)
    assert stamp.threads == torch.get_num_threads()
    assert stamp.torch == str(torch.__version__)
    assert stamp.python == ".".join(map(str, sys.version_info[:3]))
    assert stamp.driver == ""
    assert stamp.other_processes is None
    assert datetime.fromisoformat(stamp.date).tzinfo == UTC


def test_settings_follow_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-secret")
    before = dict(environment("cpu").settings)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.backends.cudnn.flags(benchmark=True):
        inside = dict(environment("cpu").settings)
    assert (before["autocast"], inside["autocast"]) == ("False", "bfloat16")
    assert (before["cudnn.benchmark"], inside["cudnn.benchmark"]) == ("False", "True")
    assert before["env.OMP_NUM_THREADS"] == "3"
    assert before["env.CUDA_VISIBLE_DEVICES"] == "set"
    names = [name for name, _ in environment("cpu").settings]
    assert names == sorted(names)


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what a machine without a GPU answers")
def test_cuda_stamp_without_a_gpu_is_empty_but_there() -> None:
    stamp = environment("cuda")
    assert stamp.device_name == "unknown GPU"
    assert finish(stamp) == stamp


@pytest.mark.gpu
def test_cuda_stamp() -> None:
    stamp = finish(environment("cuda"))
    assert stamp.device_name == torch.cuda.get_device_name()
    assert stamp.driver
    assert len(stamp.sm_clock_mhz) == 2
    assert stamp.cuda == torch.version.cuda


def test_finish_adds_clock_and_throttling(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = iter(
        [
            GpuFacts("580.1", 1980, ("software power cap",), (os.getpid(), 7)),
            GpuFacts("580.1", 1200, ("software power cap", "hardware slowdown"), ()),
        ]
    )
    monkeypatch.setattr(machine, "gpu_facts", lambda uuid: next(seen))
    before = environment("cuda")
    assert (before.driver, before.sm_clock_mhz, before.throttling) == ("580.1", (1980,), ("software power cap",))
    after = finish(before)
    assert after.sm_clock_mhz == (1980, 1200)
    assert after.throttling == ("software power cap", "hardware slowdown")
    assert replace(after, sm_clock_mhz=(1980,), throttling=before.throttling) == before


@pytest.mark.parametrize(
    ("processes", "holds_context", "others"),
    [
        (None, True, None),
        ((), True, None),
        ((os.getpid(),), True, 0),
        ((os.getpid(), 1, 2), True, 2),
        ((1, 2), False, 2),
    ],
)
def test_other_processes(processes: tuple[int, ...] | None, holds_context: bool, others: int | None) -> None:
    assert machine._others(processes, holds_context=holds_context) == others


def test_a_driver_that_fails_gives_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(uuid: str) -> None:
        raise OSError("no driver")

    monkeypatch.setattr(machine, "read_nvml", fail)
    assert gpu_facts() == GpuFacts()


def test_cpu_name(tmp_path: Path) -> None:
    listing = tmp_path / "cpuinfo"
    listing.write_text("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\n")
    assert cpu_name(str(listing)) == "Some CPU @ 2 GHz"
    assert cpu_name(str(tmp_path / "none")) != ""
