"""Efficiency by bandwidth: what ZeRO-Infinity (arXiv:2104.07857, section 4) says of its three kinds of state."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.planning.efficiency import (
    bandwidth_for,
    checkpoint_intensity,
    efficiency,
    parameter_intensity,
    state_intensity,
)
from npuzero.errors import ConfigError

V100 = 70e12  # FLOPs a second that the paper takes for a device that waits for nothing
positive = st.floats(1e-3, 1e18)


@pytest.mark.parametrize(
    ("sequence", "batch", "hidden", "interval"), [(1024, 1, 2048, 1), (1024, 4, 8192, 2), (2048, 2, 65536, 1)]
)
def test_intensities_are_flops_over_bytes(sequence: int, batch: int, hidden: int, interval: int):
    """From FLOPs and bytes of L blocks with 12 h^2 parameters each: eight FLOPs a parameter and token, of which a
    fourth is recomputation; parameters go in three times and gradients out once, in 16 bits; states of 16 bytes are
    read and written; checkpoints are written and read.
    """
    layers = 2 * interval
    parameters = 12 * layers * hidden**2
    flops = 8 * parameters * batch * sequence
    assert parameter_intensity(sequence, batch) == pytest.approx(flops / (2 * 4 * parameters))
    assert state_intensity(sequence, batch) == pytest.approx(flops / (2 * 16 * parameters))
    checkpoints = layers / interval * 2 * batch * sequence * hidden
    assert checkpoint_intensity(hidden, interval) == pytest.approx(flops / (2 * checkpoints))


def test_parameters_need_70_gb_a_second_for_a_half_with_the_smallest_batch():
    assert efficiency(parameter_intensity(1024, 1), 70e9, V100) == pytest.approx(0.5, abs=0.01)


def test_optimizer_states_need_1_23_tb_a_second_for_90_percent_and_not_1_5():
    """The paper's text says 1.5 TB/s; its formula gives 1.23, and 91 % at 1.5."""
    assert bandwidth_for(0.9, state_intensity(1024, 2), V100) == pytest.approx(1.23e12, rel=0.005)
    assert efficiency(state_intensity(1024, 2), 1.5e12, V100) == pytest.approx(0.916, abs=0.001)


def test_checkpoints_need_2_gb_a_second_for_a_half_with_2k_hidden_and_less_than_1_from_8k_on():
    assert efficiency(checkpoint_intensity(2048), 2e9, V100) > 0.5
    assert bandwidth_for(0.5, checkpoint_intensity(8192), V100) < 1e9


@given(st.floats(0.01, 0.99), st.floats(1, 1e6), st.floats(1e9, 1e16))
def test_the_inverse_gives_back_what_it_was_asked_for(wanted: float, intensity: float, flops_per_s: float):
    needed = bandwidth_for(wanted, intensity, flops_per_s)
    assert efficiency(intensity, needed, flops_per_s) == pytest.approx(wanted)


@given(positive, positive, positive, st.floats(1.0, 1e3))
def test_more_bandwidth_never_lowers_it(intensity: float, bytes_per_s: float, flops_per_s: float, factor: float):
    before = efficiency(intensity, bytes_per_s, flops_per_s)
    assert 0 < before <= 1
    assert efficiency(intensity, bytes_per_s * factor, flops_per_s) >= before
    assert efficiency(intensity, bytes_per_s, flops_per_s * factor) <= before


@pytest.mark.parametrize("value", [0, -1.0, float("nan")])
def test_what_cannot_be_is_refused(value: float):
    for wrong in ((value, 1e9, V100), (1.0, value, V100), (1.0, 1e9, value)):
        with pytest.raises(ConfigError, match="above 0"):
            efficiency(*wrong)
    for wrong in ((0.9, value, V100), (0.9, 1.0, value)):
        with pytest.raises(ConfigError, match="above 0"):
            bandwidth_for(*wrong)


@pytest.mark.parametrize("wanted", [0, 1, 1.5, -0.1, float("nan")])
def test_no_bandwidth_makes_all_of_it(wanted: float):
    with pytest.raises(ConfigError, match="above 0 and below 1"):
        bandwidth_for(wanted, 1.0, V100)
