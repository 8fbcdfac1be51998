"""Numbers that are off by ten: wrong units, both directions counted as one, bits for bytes.

Devices and links that go by a known name must be near what their vendor says. For an accelerator
of another name the ratio of its numbers must be that of a device.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["check_device", "check_tier"]

TIMES = 3.0
"""How far a number may be from its vendor's, up or down."""

# lower and upper figure of the parts of that name: bf16 TFLOPS, memory GB/s, memory GiB
DEVICES: dict[str, tuple[tuple[float, float], tuple[float, float], tuple[float, float]]] = {
    "910b": ((245.8, 376), (800, 1600), (30, 64)),
    "910c": ((280, 376), (1600, 1600), (60, 64)),
    "950": ((378, 500), (1400, 4000), (84, 112)),
    "a100": ((312, 312), (1555, 2039), (40, 80)),
    "a800": ((312, 312), (1555, 2039), (40, 80)),
    "h100": ((756, 989), (2000, 3350), (80, 94)),
    "h800": ((989, 989), (3350, 3350), (80, 80)),
    "h200": ((989, 989), (4800, 4800), (132, 141)),
    "gb200": ((2250, 2500), (7700, 8000), (180, 192)),
    "b200": ((2250, 2500), (7700, 8000), (180, 192)),
    "l40": ((181, 362), (864, 864), (44, 48)),
    "l20": ((119.5, 119.5), (864, 864), (44, 48)),
    "4090": ((165, 165), (1008, 1008), (22, 24)),
}
# one direction, of a rank or of one link to a peer
TIERS: dict[str, dict[str, tuple[float, float]]] = {
    "nvlink": {"GBps_per_rank": (150, 900), "GBps_per_link": (25, 900)},
    "hccs": {"GBps_per_rank": (98, 392), "GBps_per_link": (14, 56)},
    "ub": {"GBps_per_rank": (98, 840), "GBps_per_link": (25, 112)},
    "sio": {"GBps_per_rank": (224, 270), "GBps_per_link": (224, 270)},
    "roce": {"GBps_per_rank": (12.5, 100)},
    "infiniband": {"GBps_per_rank": (12.5, 100)},
    "pcie": {"GBps_per_rank": (12, 64), "GBps_of_bus": (12, 128)},
}
RATIO = (60.0, 1200.0)
"""Peak over memory bandwidth, FLOP per byte: 130 to 320 on the accelerators of today."""


def check_device(
    name: str, peaks: Mapping[str, float], memory_GBps: float, memory_GiB: float
) -> None:
    """Refuse numbers of a device that are far from those of its name."""
    half = peaks.get("bf16", peaks.get("fp16"))
    known = next((key for key in DEVICES if key in name.lower()), None)
    if known is not None:
        halves, *ranges = DEVICES[known]
        for dtype in ("bf16", "fp16"):
            if dtype in peaks:
                _near(f"device.peak_TFLOPS.{dtype}", peaks[dtype], *halves, name)
        found = (("memory_GBps", memory_GBps), ("memory_GiB", memory_GiB))
        for (what, value), (low, high) in zip(found, ranges, strict=True):
            _near(f"device.{what}", value, low, high, name)
    elif half is not None and half > 10:
        ratio = half * 1e3 / memory_GBps
        if not RATIO[0] <= ratio <= RATIO[1]:
            raise ValueError(
                f"device.peak_TFLOPS ({half:g}) over memory_GBps ({memory_GBps:g}) is {ratio:.3g} "
                f"FLOP per byte and must be between {RATIO[0]:g} and {RATIO[1]:g}: one of them is "
                "off by a power of ten"
            )


def check_tier(name: str, key: str, value: float) -> None:
    """Refuse a bandwidth that is far from those of the tier's name."""
    words = name.lower().replace("-", " ").replace("_", " ").split()
    for known, ranges in TIERS.items():
        if any(word.startswith(known) for word in words) and key in ranges:
            low, high = ranges[key]
            _near(f"tiers.{name}.{key}", value, low, high, name, margin=1.25)


def _near(
    what: str, value: float, low: float, high: float, name: str, *, margin: float = TIMES
) -> None:
    if not low / margin <= value <= high * margin:
        known = f"{low:g}" if low == high else f"{low:g} to {high:g}"
        raise ValueError(
            f"{what} ({value:g}) must be near what is known of {name} ({known}): check the unit, "
            "one direction, bytes and not bits"
        )
