"""Where a measurement was taken."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Environment"]


@dataclass(frozen=True, slots=True)
class Environment:
    """The stamp on every result.

    Args:
        device: ``"cuda"`` or ``"cpu"``: what ran the model.
        device_name: e.g. ``"NVIDIA H200"``; the CPU's name on the host device.
        host_cpu: CPU model name.
        cores: logical cores this process may use.
        threads: torch's intra-operator threads.
        torch: version.
        python: version.
        system: operating system and machine.
        driver: GPU driver version; empty without a GPU.
        cuda: CUDA version torch was built for; empty without one.
        sm_clock_mhz: (before, after) the measurement; empty if unknown.
        throttling: reasons the GPU gave for throttling; empty if none.
        other_processes: other processes on the GPU; None if unknown.
        load: one-minute load average of the host when measuring began; -1 if unknown.
        settings: flags that change speed or numbers (``"matmul.allow_tf32"``: ``"False"``), sorted by name.
        date: ISO date and time, UTC.
        others: threads of other programs that ran or waited for a core, mean of readings while measuring; -1 if
            unknown.
    """

    device: str
    device_name: str
    host_cpu: str
    cores: int
    threads: int
    torch: str
    python: str
    system: str
    driver: str = ""
    cuda: str = ""
    sm_clock_mhz: tuple[int, ...] = ()
    throttling: tuple[str, ...] = ()
    other_processes: int | None = None
    load: float = -1.0
    settings: tuple[tuple[str, str], ...] = ()
    date: str = ""
    others: float = -1.0
