"""The bandwidth that training needs: efficiency by arithmetic intensity (ZeRO-Infinity, arXiv:2104.07857, section 4).

Without overlap, an iteration takes the time of its FLOPs plus that of its bytes::

    efficiency = ait * bandwidth / (ait * bandwidth + peak)

with ait, the arithmetic intensity, the FLOPs per byte moved of one kind of state, and peak the FLOP/s that the device
reaches without waiting (the paper assumes 70e12 for a V100).

According to the paper, optimizer states need 1.5 TB/s for an efficiency of 90 % with a batch of two sequences of 1,024
per device. By its own formula it is 1.23 TB/s: :func:`bandwidth_for` of 0.9, ``state_intensity(1024, 2)`` and 70e12.
"""

from __future__ import annotations

from npuzero.errors import ConfigError


def parameter_intensity(sequence: int, batch: int) -> float:
    """Return the FLOPs per byte of parameters (moved three times) and gradients (moved once).

    An iteration with recomputation has 8 FLOPs per parameter and token, and moves 4 * 2 bytes per parameter: sequence *
    batch.

    Args:
        sequence, batch: tokens of a sequence, and sequences of a device.
    """
    return float(sequence * batch)


def state_intensity(sequence: int, batch: int) -> float:
    """Return the FLOPs per byte of optimizer states: sequence * batch / 4.

    16 bytes per parameter are read and written once per iteration.
    """
    return sequence * batch / 4


def checkpoint_intensity(hidden: int, interval: int = 1) -> float:
    """Return the FLOPs per byte of activation checkpoints: 24 * hidden * interval.

    One checkpoint per ``interval`` blocks is written and read back.
    """
    return 24.0 * hidden * interval


def efficiency(intensity: float, bytes_per_s: float, flops_per_s: float) -> float:
    """Return the fraction of ``flops_per_s`` that remains if bytes of an intensity arrive at ``bytes_per_s``.

    Source: ZeRO-Infinity, section 4.1.

    Raises:
        ConfigError: a number is not above 0.

    Example::

        from benchmarks.planning.efficiency import efficiency, parameter_intensity

        print(efficiency(parameter_intensity(sequence=1024, batch=1), 70e9, 70e12))  # a half
    """
    for name, value in (("intensity", intensity), ("bytes_per_s", bytes_per_s), ("flops_per_s", flops_per_s)):
        _check_positive(f"efficiency({name}=)", value)
    return intensity * bytes_per_s / (intensity * bytes_per_s + flops_per_s)


def bandwidth_for(wanted: float, intensity: float, flops_per_s: float) -> float:
    """Return the bytes per second that an efficiency of ``wanted`` needs: the inverse of :func:`efficiency`.

    Raises:
        ConfigError: the efficiency is not between 0 and 1, or a number is not above 0.

    Example::

        from benchmarks.planning.efficiency import bandwidth_for, state_intensity

        print(bandwidth_for(0.9, state_intensity(sequence=1024, batch=2), 70e12))  # 1.23e12
    """
    _check_positive("bandwidth_for(intensity=)", intensity)
    _check_positive("bandwidth_for(flops_per_s=)", flops_per_s)
    if not 0 < wanted < 1:
        raise ConfigError(
            "bandwidth_for(wanted=)", expected="above 0 and below 1", got=repr(wanted), do="No bandwidth makes it 1."
        )
    return wanted / (1 - wanted) * flops_per_s / intensity


def _check_positive(subject: str, value: float) -> None:
    if not value > 0:
        raise ConfigError(subject, expected="a number above 0", got=repr(value), do="Count it for one device.")
