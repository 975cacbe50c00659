"""Published arithmetic against the tables it was published with, to the print's last digit or half a percent.

Where the rows are from: ZeRO's tables 1 and 2 were read in the paper. Those of ZeRO-Infinity (figure 2a) and Narayanan
et al. (table 1) were written down from memory of the papers, which were not at hand; each agrees with its formula but
for one, which is named below.

Not here, for they are measured or drawn, not printed as numbers that a formula gives: ZeRO's figures 2 to 8,
ZeRO-Infinity's figure 3 (its curves are in test_efficiency.py by their formula), Korthikanti's figures 1 and 7 (bars
without figures), and Partial-FC's figures (its formulas are tested against an example).
"""

from __future__ import annotations

import math

import pytest
from torch import nn

import npuzero
from benchmarks.planning import formulas
from npuzero.errors import ConfigError

GB, GIB, TIB = 1e9, 2**30, 2**40


def is_printed(value: float, text: str) -> bool:
    """Whether a table prints ``value`` as ``text``: rounded or cut off at its last digit, or half a percent off."""
    digits = len(text.partition(".")[2])
    return abs(value - float(text)) < 10**-digits or math.isclose(value, float(text), rel_tol=0.005)


def assert_printed(value: float, text: str) -> None:
    assert is_printed(value, text), f"printed {text}, computed {value}"


def test_a_print_is_held_to_its_last_digit():
    assert is_printed(31.406, "31.4")
    assert is_printed(0.1172, "0.12")
    assert is_printed(2218.75, "2218")
    assert not is_printed(31.6, "31.4")
    assert not is_printed(0.1, "0.12")


# ZeRO (arXiv:1910.02054), table 1: GB a device of P_os, P_os+g, P_os+g+p, for 7.5B, 128B and 1T parameters.
ZERO_1 = """
1     120  120  120    2048 2048 2048   16000 16000 16000
4     52.5 41.3 30     896  704  512    7000  5500  4000
16    35.6 21.6 7.5    608  368  128    4750  2875  1000
64    31.4 16.6 1.88   536  284  32     4187  2218  250
256   30.4 15.4 0.47   518  263  8      4046  2054  62.5
1024  30.1 15.1 0.12   513  257  2      4011  2013  15.6
"""


@pytest.mark.parametrize("row", ZERO_1.strip().splitlines())
def test_zero_table_1(row: str):
    ranks, *cells = row.split()
    for at, text in enumerate(cells):
        parameters, stage = (7.5e9, 128e9, 1e12)[at // 3], at % 3 + 1
        assert_printed(formulas.model_state_bytes(parameters, int(ranks), stage) / GB, text)


# Table 2: parameters that 32 GB a device hold with 64 ranks of data parallelism, in billions or trillions (T).
ZERO_2 = """
1   64    2   7.6    14.4   128
2   128   4   15.2   28.8   256
4   256   8   30.4   57.6   0.5T
8   512   16  60.8   115.2  1T
16  1024  32  121.6  230.4  2T
"""


@pytest.mark.parametrize("row", ZERO_2.strip().splitlines())
def test_zero_table_2(row: str):
    model_parallel, devices, *cells = row.split()
    divided, ranks = int(model_parallel), int(devices) // int(model_parallel)
    for stage, text in enumerate(cells):
        one = round(formulas.largest_model(32 * GB, ranks, stage) / 1e9, 1)  # the paper multiplies what it has rounded
        if text.endswith("T"):
            assert_printed(divided * one / 1000, text[:-1])
        else:
            assert divided * one == pytest.approx(float(text))
        assert formulas.largest_model(32 * GB, ranks, stage, model_parallel=divided) == pytest.approx(
            divided * formulas.largest_model(32 * GB, ranks, stage)
        )


# ZeRO-Infinity (arXiv:2104.07857), figure 2(a), in binary units, sequences of 1,024: parameters in trillions, layers,
# hidden size in 1,024s, heads; model states in TB, activations and their checkpoints in TB a node of 16; working memory
# of model states and of activations in GB a GPU.
INFINITY = """
0.10    80   10   128   1.83     2.03   0.05  1.95    1.63
0.50    100  20   160   9.16     3.91   0.12  6.25    2.50
1.01    128  25   256   18.31    7.13   0.20  9.77    3.56
10.05   195  64   512   182.81   24.38  0.76  64.00   8.00
101.47  315  160  1024  1845.70  88.59  3.08  400.00  18.00
"""


@pytest.mark.parametrize("row", INFINITY.strip().splitlines())
def test_zero_infinity_figure_2a(row: str):
    trillions, *shape, states, activations, checkpoints, working, between = row.split()
    layers, thousands, heads = map(int, shape)
    hidden, sequence, per_gpu, per_node = 1024 * thousands, 1024, 4, 32
    parameters = formulas.block_parameters(layers, hidden)
    assert_printed(parameters / 1e12, trillions)
    # 20 bytes a parameter: K counts float32 gradients.
    twenty = formulas.model_state_bytes(parameters, k=formulas.ADAM_K_WITH_FP32_GRADIENTS)
    assert twenty == 20 * parameters
    assert_printed(twenty / TIB, states)
    awm = formulas.activation_working_bytes(per_gpu, sequence, hidden, heads)
    assert_printed(awm / GIB, between)
    assert_printed(16 * layers * awm / TIB, activations)
    # These are of a batch of 32 a node, working memory is of 4 a GPU: as printed, the two do not fit together.
    assert_printed(formulas.activation_checkpoint_bytes(per_node, sequence, hidden, layers) / TIB, checkpoints)
    if working == "1.95":  # 4h * 4h is 1.56 for h = 10K: the first row does not follow the formula, all others do
        assert formulas.state_working_bytes(hidden) / GIB == 1.5625
    else:
        assert_printed(formulas.state_working_bytes(hidden) / GIB, working)


# Narayanan et al. (arXiv:2104.04473), table 1: billions of parameters, heads, hidden size, layers.
NARAYANAN = """
1.7     24   2304   24
3.6     32   3072   30
7.5     32   4096   36
18.4    48   6144   40
39.1    64   8192   48
76.1    80   10240  60
145.6   96   12288  80
310.1   128  16384  96
529.6   128  20480  105
1008.0  160  25600  128
"""


@pytest.mark.parametrize("row", NARAYANAN.strip().splitlines())
def test_narayanan_table_1_parameters(row: str):
    billions, _, hidden, layers = row.split()
    assert_printed(formulas.transformer_parameters(int(layers), int(hidden), 51200, 2048) / 1e9, billions)


@pytest.mark.parametrize("row", NARAYANAN.strip().splitlines())
def test_flops_are_those_of_the_products(row: str):
    """Of a block 24 B s h^2 and 4 B s^2 h, of the logits 2 B s h V; backward twice that, recomputation the blocks'."""
    *_, hidden, layers = (int(each) if each.isdigit() else 0 for each in row.split())
    batch, sequence, vocabulary = 8, 2048, 51200
    block = 24 * batch * sequence * hidden**2 + 4 * batch * sequence**2 * hidden
    logits = 2 * batch * sequence * hidden * vocabulary
    shape = batch, sequence, layers, hidden, vocabulary
    assert formulas.iteration_flops(*shape) == pytest.approx(4 * layers * block + 3 * logits)
    assert formulas.iteration_flops(*shape, recompute=False) == pytest.approx(3 * (layers * block + logits))
    core = 4 * batch * sequence**2 * hidden
    assert formulas.selective_flops(*shape) == pytest.approx(3 * (layers * block + logits) + layers * core * 3)


@pytest.mark.parametrize(
    ("tokens", "parameters", "devices", "flops_per_s", "days"),
    [(300e9, 175e9, 1024, 140e12, 34), (450e9, 1008e9, 3072, 163e12, 84)],
)
def test_days_to_train(tokens: float, parameters: float, devices: int, flops_per_s: float, days: int):
    """GPT-3 and the trillion, as Narayanan et al. have them in section 5.1."""
    assert_printed(formulas.training_s(tokens, parameters, devices, flops_per_s) / 86400, str(days))


def test_bubbles():
    assert formulas.bubble(4, 8) == 3 / 8
    assert formulas.bubble(4, 8, chunks=2) == 3 / 16


# -- activations (arXiv:2205.05198) ------------------------------------------------------------------------------------

GPT_3, MT_NLG = (12288, 96), (20480, 128)


@pytest.mark.parametrize(("model", "scores", "saved"), [(GPT_3, 80, 70), (MT_NLG, 64, 65)])
def test_selective_recomputation_saves_what_the_paper_says(model: tuple[int, int], scores: int, saved: int):
    hidden, heads = model
    whole = formulas.layer_activation_bytes(1, 2048, hidden, heads)
    assert whole == 2048 * hidden * (34 + scores)
    part = formulas.layer_activation_bytes(1, 2048, hidden, heads, selective=True)
    assert_printed(100 * (1 - part / whole), str(saved))


@pytest.mark.parametrize(("layers", "hidden", "percent"), [(96, 12288, "2.7"), (105, 20480, "1.6")])
def test_selective_recomputation_costs_what_the_paper_says(layers: int, hidden: int, percent: str):
    shape = 1, 2048, layers, hidden, 51200
    more = formulas.selective_flops(*shape) / formulas.iteration_flops(*shape, recompute=False) - 1
    assert_printed(100 * more, percent)


def test_every_row_of_table_2():
    """No parallelism; tensor; tensor and sequence; with selective recomputation; and full recomputation's 2 s b h."""
    s, b, h, a, t = 2048, 4, 6144, 64, 8
    row = formulas.layer_activation_bytes
    assert row(b, s, h, a) == pytest.approx(s * b * h * (34 + 5 * a * s / h))
    assert row(b, s, h, a, tensor=t) == pytest.approx(s * b * h * (10 + 24 / t + 5 * a * s / (h * t)))
    both = row(b, s, h, a, tensor=t, sequence_parallel=True)
    assert both == pytest.approx(s * b * h * (34 / t + 5 * a * s / (h * t)))
    assert row(b, s, h, a, tensor=t, selective=True) == pytest.approx(s * b * h * (10 + 24 / t))
    least = row(b, s, h, a, tensor=t, sequence_parallel=True, selective=True)
    assert least == pytest.approx(s * b * h * 34 / t)
    assert formulas.activation_checkpoint_bytes(b, s, h, 1) == 2 * s * b * h
    assert formulas.first_stage_factor(8) == 1
    assert formulas.first_stage_factor(8, 3) == pytest.approx(1 + 7 / 24)


# -- traffic -----------------------------------------------------------------------------------------------------------


def test_zero_s_traffic_is_what_is_sent():
    """2 P in stages 0 to 2 and 3 P in stage 3, times (N - 1) / N: npuzero.predict, in elements of fp32."""
    net, ranks = nn.Linear(64, 512, bias=False), 8
    for stage in range(4):
        report = npuzero.predict(net, stage, world=ranks, precision="fp32")
        sent = sum(report.bytes_sent.values()) - report.bytes_sent["control"]
        elements = sent / 4 / (64 * 512)
        assert elements == pytest.approx(formulas.zero_traffic(stage) * (ranks - 1) / ranks, rel=1e-3)
    assert formulas.ring_factor(ranks) == pytest.approx(2 * (ranks - 1) / ranks)


def test_zeropp_s_traffic():
    """ZeRO++ (arXiv:2306.10209), table 1: 3 M, and what each of the three leaves of it."""
    assert formulas.zeropp_traffic() == 3
    assert formulas.zeropp_traffic(weights=True) == 2
    assert formulas.zeropp_traffic(secondary=True) == 2
    assert formulas.zeropp_traffic(gradients=True) == 2.25
    assert formulas.zeropp_traffic(weights=True, secondary=True, gradients=True) == 0.75


def test_dividing_checkpoints_costs_less_than_a_tenth():
    assert formulas.partitioned_activations_traffic() == 1 / (6 * 2)
    assert formulas.partitioned_activations_traffic() < 0.1


def test_partial_fc():
    """Ten million classes with 512 features on 64 ranks of 64 samples: 19.07 GiB of centres, 305 MiB of a rank."""
    assert_printed(formulas.class_weight_bytes(512, 10**7) / GIB, "19.07")
    assert_printed(formulas.class_weight_bytes(512, 10**7, 64) / 2**20, "305")
    assert_printed(formulas.class_logit_bytes(64 * 64, 10**7, 64) / 2**20, "2441")
    assert_printed(formulas.class_logit_bytes(64 * 64, 10**7, 64, sampled=0.1) / 2**20, "244")


# -- the other count ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", range(4))
def test_npuzero_counts_float32_sums_of_gradients(stage: int):
    """What npuzero.predict says of 7.5M parameters on 64 ranks is the paper's formula with gradients of 4 bytes."""
    net = nn.Linear(3000, 2500, bias=False)
    report = npuzero.predict(net, stage, world=64, precision="bf16")
    resting = sum(report.bytes_held[state] for state in ("parameters", "gradients", "states"))
    ours = formulas.model_state_bytes(7.5e6, 64, stage, gradient_bytes=4)
    assert resting == pytest.approx(ours, rel=0.005)
    papers = formulas.model_state_bytes(7.5e6, 64, stage)
    assert ours - papers == pytest.approx(2 * 7.5e6 / (64 if stage >= 2 else 1))


def test_no_such_stage():
    with pytest.raises(ConfigError, match="0, 1, 2 or 3"):
        formulas.model_state_bytes(1e9, 8, 4)
    with pytest.raises(ConfigError, match="0, 1, 2 or 3"):
        formulas.zero_traffic(-1)
