"""Accelerators that `plan` knows: memory, and the rates that a decode step really gets.

A step is modelled with *effective* rates. Those of H200 and MI355X are the planning figures of this
project (H200's memory rate is measured: a device copy moves 4.3 TB/s). For the others only peaks
are published; the share of its peaks that H200 or MI355X reaches is then assumed of them too:

| | memory | bf16 | fp8 | link |
|---|---|---|---|---|
| H200, of 4.8 TB/s, 989 and 1979 TFLOP/s, 450 GB/s a direction | 0.90 | 0.80 | 0.71 | 0.80 |
| MI355X, of 8 TB/s, 2.5 and 5.0 PFLOP/s, 538 GB/s a direction | 0.80 | 0.64 | 0.64 | 0.74 |
"""

from dataclasses import dataclass

GB = 10**9


@dataclass(frozen=True)
class Device:
    """One accelerator; rates in bytes or operations per second.

    Attributes:
        name: as users write it.
        memory: bytes.
        hbm: bytes per second from its memory.
        bf16: dense operations per second.
        fp8: the same in e4m3.
        attention: operations per second of a sparse attention kernel (FlashMLA class: about half
            of bf16).
        link: bytes per second and direction to the other devices of the host.
        source: where the numbers come from.
    """

    name: str
    memory: int
    hbm: float
    bf16: float
    fp8: float
    attention: float
    link: float
    source: str


_NVIDIA, _AMD = (0.90, 0.80, 0.71, 0.80), (0.80, 0.64, 0.64, 0.74)


def _from_peaks(name, gigabytes, hbm, bf16, fp8, link, shares, source) -> Device:
    """A device of which only peaks are known: TB/s, TFLOP/s dense, GB/s per direction."""
    memory, half, quarter, wire = shares
    return Device(
        name=name,
        memory=gigabytes * GB,
        hbm=hbm * memory * 1e12,
        bf16=bf16 * half * 1e12,
        fp8=fp8 * quarter * 1e12,
        attention=bf16 * half * 1e12 / 2,
        link=link * wire * 1e9,
        source=f"peaks from {source}; effective rates assumed",
    )


_PLANNED = "planning figures of this project, effective"

DEVICES = {
    device.name: device
    for device in (
        Device("H200", 141 * GB, 4.3e12, 790e12, 1.4e15, 400e12, 360e9, _PLANNED),
        Device("MI355X", 288 * GB, 6.4e12, 1.6e15, 3.2e15, 800e12, 400e9, _PLANNED),
        _from_peaks(
            *("H100", 80, 3.35, 989.4, 1978.9, 450, _NVIDIA),
            source="https://glennklockwood.com/garden/processors/h100 (SXM5)",
        ),
        _from_peaks(
            *("B200", 180, 8.0, 2250, 4500, 900, _NVIDIA),
            source="https://fibermall.com/blog/?p=17161 (HGX B200: 1.4 TB and 36/72 PFLOP/s "
            "with sparsity over 8), memory rate https://www.yobitel.com/knowledge-base/nvidia-b300",
        ),
        _from_peaks(
            *("B300", 288, 8.0, 2250, 4500, 900, _NVIDIA),
            source="https://glennklockwood.com/garden/processors/B300",
        ),
        _from_peaks(
            *("MI300X", 192, 5.3, 1300, 2600, 448, _AMD),
            source="https://www.jaredwatkins.com/research/ai-accelerators/amd-instinct/"
            "mi300-series/, links https://www.emergentmind.com/topics/amd-mi300x-gpu",
        ),
    )
}


def device(name: str) -> Device:
    """The device of that name, whatever its case.

    Raises:
        ValueError: no such device; the message lists those there are.
    """
    for known in DEVICES.values():
        if known.name.lower() == name.lower():
            return known
    raise ValueError(
        f"device={name!r} is not in the table: use one of {', '.join(DEVICES)} (from Python, "
        "dcp_jax.plan.devices.Device describes any other)."
    )
