"""What becomes of the keys of public configurations: each is followed, noted or refused, and none is dropped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from npuzero.cli import main
from npuzero.compat import Decision
from npuzero.compat.internevo import RULES, evaluate, explain, load
from npuzero.compat.rules import flatten_mapping
from npuzero.errors import ConfigError
from npuzero.plan import MeshShape, Plan

CONFIGS = Path(__file__).parent / "configs"
PUBLIC = sorted(path.stem for path in CONFIGS.glob("*.py"))
#: Of these npuzero has not what they ask for.
REFUSED = {
    "7B_llama2_zeropp": {"data.unit_schedule_size", "parallel.pipeline.use_zeropp", "parallel.pipeline.decouple_grad"}
}

#: Name, ranks, and what it comes to: sizes that are not 1, plan, local_size.
MEANT = [
    ("7B_sft", 8, {}, "zero1", None),
    ("7B_internlm2", 8, {}, "zero1", None),
    ("7B_internlm2", 64, {}, "zero1.5", 8),
    ("7B_isp_sft", 8, {"sequence": 2}, "isp", 4),
    ("20B_isp_sft", 64, {"sequence": 32}, "isp", 4),
    ("20B_internlm2", 128, {"pipe": 4}, "weight", 4),
    ("20B_internlm2", 256, {"pipe": 4, "pod": 2}, "weight", 4),
    ("7B_MoE4_sft", 16, {}, "zero1", None),
    ("57B_qwen2_MoE", 16, {}, "zero1", None),
    ("qwen3_30B_A3B", 64, {}, "weight", 8),
    ("8B_internlm3", 64, {"pod": 4}, "weight", 16),
    ("7B_chameleon", 64, {"tensor": 4, "pipe": 4}, "zero1", None),
    ("70B_sft_llama2", 64, {"tensor": 4, "pipe": 8}, "zero1", None),
    ("deepseek3_hf", 16, {}, "zero3", None),
    ("20231221_hw_config", 8, {}, "zero1", None),
    ("demo", 64, {"tensor": 2}, "zero1.5", 16),
]


def write_config(path: Path, values: dict[str, Any]) -> Path:
    path.write_text("".join(f"{name} = {value!r}\n" for name, value in values.items()))
    return path


def load_config_text(tmp_path, text):
    (tmp_path / "config.py").write_text(text)
    return load(tmp_path / "config.py")


@pytest.mark.parametrize(("name", "ranks", "sizes", "plan", "local_size"), MEANT)
def test_public_configurations_come_to_mesh_and_plan(name, ranks, sizes, plan, local_size):
    config = load(CONFIGS / f"{name}.py")
    expected = {"pipe": 1, "pod": 1, "sequence": 1, "tensor": 1, "local_size": local_size, **sizes}
    assert config.sizes(ranks) == expected
    assert (config.plan(ranks).name, config.plan(ranks).local_size) == (plan, local_size)
    assert config.plan(ranks).precision == config.precision


def test_all_public_configurations_are_followed_or_refused_by_name():
    assert {name for name, *_ in MEANT} | set(REFUSED) == set(PUBLIC)
    for name, paths in REFUSED.items():
        with pytest.raises(ConfigError) as caught:
            load(CONFIGS / f"{name}.py")
        assert set(caught.value.facts["refused"]) == paths
        assert all(path in str(caught.value) for path in paths)


def config_fingerprint(config) -> Any:
    """All that follows from a configuration."""
    sizes = config.sizes(1024)
    made = (config.plan(1024), config.settings, config.division, config.checkpointed, config.max_norm, config.mode)
    said = [config.translation.into(owner) for owner in ("AdamW", "lr_scheduler", "beta2_scheduler")]
    return repr((sizes, made, config.scaler().state_dict(), said))


def odd_key_values(value: Any) -> list[Any]:
    """Values that nobody expects there, the first of the same kind."""
    if isinstance(value, bool):
        return [not value, "odd", 7]
    if isinstance(value, (int, float)):
        return [value * 2 + 3, -7.5, "odd"]
    if isinstance(value, str):
        return ["odd", 7]
    return ["odd", 7, ["odd"]]


def replace_nested_key(values: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    key, _, rest = path.partition(".")
    return {**values, key: replace_nested_key(values[key], rest, value) if rest else value}


@pytest.mark.parametrize("name", ["8B_internlm3", "7B_chameleon", "20231221_hw_config"])
def test_an_odd_value_in_any_leaf_changes_something_or_is_spoken_of(tmp_path, name):
    values = dict(evaluate(CONFIGS / f"{name}.py").values)
    config = load(write_config(tmp_path / "config.py", values))
    usual, seen = config_fingerprint(config), set()
    idle = {entry.path for entry in config.translation.decided(Decision.NOTED)}
    for path, value in flatten_mapping(values):
        for other in odd_key_values(value):
            try:
                config = load(write_config(tmp_path / "config.py", replace_nested_key(values, path, other)))
                differs = config_fingerprint(config) != usual
            except ConfigError as error:
                seen.add("refused")
                assert path in str(error) or path.split(".")[0] in str(error), (path, other, error)
                continue
            entry = next((entry for entry in config.translation.entries if entry.path == path), None)
            noted = entry is not None and entry.decision is Decision.NOTED and bool(entry.words)
            assert differs or noted or path in idle, (path, other)
            seen.add("differs" if differs else "noted")
    assert seen == {"refused", "differs", "noted"}


def test_every_rule_says_something_and_those_that_count_go_somewhere():
    for rule in RULES:
        assert rule.words.endswith("."), rule.path
        assert bool(rule.target) == (rule.decision in (Decision.HONOURED, Decision.TRANSLATED)), rule.path


@pytest.mark.parametrize(
    ("text", "path", "words"),
    [
        ("adam = dict(learning_rate=1)", "adam.learning_rate", "remove|Did you mean"),
        ("adam = dict(adam_bta1=0.9)", "adam.adam_bta1", "'adam_beta1'"),
        ("hybrid_zero_optimizer = dict(clip_grad=1.0)", "hybrid_zero_optimizer.clip_grad", "'clip_grad_norm'"),
        ("paralel = dict(zero1=8)", "paralel", "'parallel'"),
        ("parallel = dict(zero2=dict(size=8))", "parallel.zero2", "'zero1'"),
        ("model = dict(dtyp='torch.float32')", "model.dtyp", "'dtype'"),
        ("model = dict(chekpoint=True)", "model.chekpoint", "'checkpoint'"),
        ("data = dict(micro_nun=4)", "data.micro_nun", "'micro_num'"),
        ("adam = 3", "adam", "section"),
        ("parallel = dict(tensor=dict(size=2, mode='tp'))", "parallel.tensor.mode", "mtp, msp, fsp, isp"),
        ("parallel = dict(tensor=0)", "parallel.tensor.size", "from 1"),
        ("parallel = dict(weight=dict(size=4))", "parallel.weight.size", "mode='isp'"),
        (
            "parallel = dict(tensor=dict(size=1, mode='isp'), zero1=dict(size=-1, fsdp=True))",
            "parallel.zero1.fsdp",
            "isp",
        ),
        ("parallel = dict(pipeline=dict(size=2, mode='ZBV'))", "parallel.pipeline.mode", "ZBH1"),
        (
            "parallel = dict(pipeline=dict(size=2, zero_bubble=True))\nmodel = dict(num_chunks=2)",
            "model.num_chunks",
            "take 1",
        ),
        ("parallel = dict(sequence_2D=dict(enable=True))", "parallel.sequence_2D.enable", "mode='isp'"),
        ("parallel = dict(data=8)", "parallel.data", "drop it"),
        ("data = dict(micro_num=4, gradient_accumulation=2)", "data.gradient_accumulation", "drop one"),
        ("data = dict(rampup_batch_size='192 24 8')", "data.rampup_batch_size", "divide losses"),
        ("model = dict(dtype='bfloat16')", "model.dtype", "torch.bfloat16"),
        ("model = dict(checkpoint=1.5)", "model.checkpoint", "0 to 1"),
        ("adam = dict(lr=-1.0)", "adam.lr", "from 0"),
        ("adam = dict(clip_grad=4.0)", "adam.clip_grad", "clip_grad_norm"),
        ("grad_scaler = dict(backoff_factor=1.5)", "grad_scaler.backoff_factor", "between 0 and 1"),
        ("grad_scaler = dict(max_scale=4)", "grad_scaler.max_scale", "initial_scale"),
        ("grad_scaler = dict(fp16=dict(min_scale=2**20))", "grad_scaler.fp16.min_scale", "initial_scale"),
        ("use_fp32_norm = True", "use_fp32_norm", "float32"),
        ("fp8 = dict(margin=0)", "fp8", "model.dtype"),
        ("lr_scheduler = dict(last_epoch=5)", "lr_scheduler.last_epoch", "state_dict"),
        ("hybrid_zero_optimizer = dict(reduce_bucket_size=0)", "hybrid_zero_optimizer.reduce_bucket_size", "from 1"),
    ],
)
def test_what_is_refused_names_key_and_way_out(tmp_path, text, path, words):
    with pytest.raises(ConfigError, match=words) as caught:
        load_config_text(tmp_path, text)
    assert path in caught.value.facts["refused"]
    assert [entry.path for entry in explain(tmp_path / "config.py").decided(Decision.REFUSED)] == [path]


def test_the_command_prints_what_becomes_of_each_key(capsys):
    assert main(["config", "explain", str(CONFIGS / "7B_isp_sft.py"), "--world", "16"]) == 0
    printed = capsys.readouterr().out
    assert "parallel.weight.size" in printed and "Of 16 ranks: the plan 'isp'" in " ".join(printed.split())
    assert main(["config", "explain", str(CONFIGS / "7B_llama2_zeropp.py")]) == 0
    assert "npuzero has no ZeroPP" in " ".join(capsys.readouterr().out.split())
    assert main(["config", "keys", ".py"]) == 0
    assert "grad_scaler.hysteresis" in capsys.readouterr().out
    assert main(["config", "explain", str(CONFIGS / "7B_isp_sft.py"), "--world", "3"]) == 0
    assert "a divisor of the 3 ranks" in " ".join(capsys.readouterr().out.split())
    assert main(["config", "explain", str(CONFIGS / "7B_sft.py"), "--auto", "adam.lr=1"]) != 0


def test_names_of_the_files_own_are_noted_and_keys_of_the_users_own_sections(tmp_path):
    config = load_config_text(
        tmp_path, "rate = 2e-4\nLOST = 1\nadam = dict(lr=rate)\nmodel = dict(width=4)\ndata = dict(shards=2)"
    )
    noted = {entry.path for entry in config.translation.decided(Decision.NOTED)}
    assert {"rate", "LOST", "model.width", "data.shards"} <= noted
    assert config.translation.into("AdamW") == {"lr": 2e-4}
    assert config.values["model"] == {"width": 4}


# -- modes and sizes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["mtp", "msp", "fsp"])
@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("pipe", [1, 2])
@pytest.mark.parametrize(("zero1", "stage"), [(-1, 1), (0, 1), (1, 0), (2, 1.5), (4, 1.5)])
def test_layers_are_divided_over_tensor_ranks(tmp_path, mode, tensor, pipe, zero1, stage):
    text = f"parallel = dict(zero1={zero1}, tensor=dict(size={tensor}, mode={mode!r}), pipeline={pipe})"
    config = load_config_text(tmp_path, text + "\nmodel = dict(dtype='torch.float32')")
    ranks = 8 * tensor * pipe
    local_size = zero1 if stage == 1.5 else None
    assert config.sizes(ranks) == {"pipe": pipe, "pod": 1, "sequence": 1, "tensor": tensor, "local_size": local_size}
    assert config.plan(ranks) == Plan.preset(stage, precision="fp32", local_size=local_size)
    assert config.mode == mode


@pytest.mark.parametrize("sequence", [1, 2, 4])
@pytest.mark.parametrize("weight", [1, 2, 4])
@pytest.mark.parametrize("zero1", [-1, 1, 2])
def test_isp_shards_weights_over_local_and_states_over_zero1_groups_of_them(tmp_path, sequence, weight, zero1):
    text = f"parallel = dict(zero1={zero1}, tensor=dict(size={sequence}, mode='isp'), weight=dict(size={weight}))"
    config = load_config_text(tmp_path, text + "\nmodel = dict(dtype='torch.bfloat16')")
    sizes, plan = config.sizes(16), config.plan(16)
    alike = 16 // weight  # ranks that have the same weights
    node = alike if zero1 == -1 else zero1
    assert sizes == {"pipe": 1, "pod": alike // node, "sequence": sequence, "tensor": 1, "local_size": weight}
    shape = MeshShape(node=node, local=weight, pod=alike // node, sequence=sequence)
    assert shape.size(plan.parameters.axes) == shape.size(plan.gradients.axes) == weight
    assert shape.size(plan.states.axes) == weight * node
    preset = Plan.preset("isp", precision="bf16", local_size=weight)
    assert plan.parts == preset.parts
    assert (plan == preset) is (sequence > 1)


def test_states_are_shared_by_the_ranks_that_internevo_has_share_them(tmp_path):
    """The groups of its own example: 32 ranks, of which 8 share weights, and 2 of those that have the same states."""
    text = "parallel = dict(zero1=2, tensor=dict(size=4, mode='isp'), weight=8)"
    config = load_config_text(tmp_path, text)
    assert config.sizes(32) == {"pipe": 1, "pod": 2, "sequence": 4, "tensor": 1, "local_size": 8}
    shape = MeshShape(pod=2, node=2, local=8, sequence=4)
    places = [shape.place(rank) for rank in range(32)]
    groups: dict[tuple[int, int], list[int]] = {}
    for rank, place in enumerate(places):
        groups.setdefault((place["pod"], place["local"]), []).append(rank)
    expected = [[rank, rank + 8] for rank in (*range(8), *range(16, 24))]
    assert list(groups.values()) == expected


@pytest.mark.parametrize(
    ("text", "plan", "axes"),
    [
        ("zero1=dict(size=-1, fsdp=True)", "zero3", ("node", "local")),
        ("fsdp=dict(enable=True, mode='v2'), zero1=dict(size=1)", "zero3", ("node", "local")),
        ("zero1=dict(size=4, fsdp=True)", "fsdp in groups", ("local",)),
        ("zero1=dict(size=1, fsdp=True)", "zero0", ()),
    ],
)
def test_fsdp_shards_parameters_like_states(tmp_path, text, plan, axes):
    made = load_config_text(tmp_path, f"parallel = dict({text})").plan(16)
    assert made.name == plan
    assert {placement.axes for placement in made.parts.values()} == {axes}


@pytest.mark.parametrize(
    ("text", "ranks", "key"),
    [
        ("tensor=3", 8, "parallel.tensor.size"),
        ("pipeline=3", 8, "parallel.pipeline.size"),
        ("zero1=16", 8, "parallel.zero1.size"),
        ("zero1=3", 8, "parallel.zero1.size"),
        ("tensor=dict(size=1, mode='isp'), weight=3", 8, "parallel.weight.size"),
        ("tensor=dict(size=3, mode='isp')", 8, "parallel.tensor.size"),
        ("tensor=dict(size=1, mode='isp'), weight=4, zero1=4", 8, "parallel.zero1.size"),
    ],
)
def test_sizes_that_do_not_divide_the_ranks_are_refused(tmp_path, text, ranks, key):
    config = load_config_text(tmp_path, f"parallel = dict({text})")
    with pytest.raises(ConfigError, match="a divisor of") as caught:
        config.plan(ranks)
    assert caught.value.subject == key


@pytest.mark.parametrize(
    ("text", "overlap"),
    [
        ("hybrid_zero_optimizer = dict(overlap_sync_grad=True)", "gradients"),
        ("hybrid_zero_optimizer = dict(zero_overlap_communication=True)", "gradients"),
        ("hybrid_zero_optimizer = dict(overlap_sync_param=True)", "parameters"),
        ("hybrid_zero_optimizer = dict(overlap_sync_grad=True, overlap_sync_param=True)", True),
        ("hybrid_zero_optimizer = dict(overlap_sync_grad=False)", False),
        ("parallel = dict(tensor=dict(size=1, mode='isp'), weight=dict(size=2, overlap=True))", True),
        ("parallel = dict(tensor=dict(size=1, mode='isp'), weight=dict(size=1, overlap=True))", False),
        ("parallel = dict(pipeline=2)", "activations"),
        ("parallel = dict(pipeline=dict(size=2, interleaved_overlap=False))\nmodel = dict(num_chunks=2)", False),
        ("parallel = dict(pipeline=2)\nhybrid_zero_optimizer = dict(overlap_sync_grad=True)", True),
    ],
)
def test_switches_of_overlap_come_to_one_setting(tmp_path, text, overlap):
    assert load_config_text(tmp_path, text).settings.overlap == overlap


def test_that_two_of_three_overlaps_are_all_is_noted(tmp_path):
    text = "parallel = dict(pipeline=2)\nhybrid_zero_optimizer = dict(overlap_sync_grad=True, overlap_sync_param=False)"
    config = load_config_text(tmp_path, text)
    noted = {entry.path: entry.words for entry in config.translation.decided(Decision.NOTED)}
    assert "two of" in noted["hybrid_zero_optimizer.overlap_sync_param"]


@pytest.mark.parametrize(("dtype", "itemsize"), [("torch.bfloat16", 2), ("torch.half", 2), ("torch.float32", 4)])
def test_a_bucket_is_said_in_elements(tmp_path, dtype, itemsize):
    text = f"model = dict(dtype={dtype!r})\nhybrid_zero_optimizer = dict(reduce_bucket_size=1000)"
    config = load_config_text(tmp_path, text)
    assert config.settings.bucket_bytes == 1000 * itemsize
    rows = {row[0]: row for row in config.translation.rows()}
    assert rows["hybrid_zero_optimizer.reduce_bucket_size"][1:4] == (
        "1000",
        "translated",
        f"Settings.bucket_bytes = {1000 * itemsize}",
    )


@pytest.mark.parametrize(
    ("text", "division"),
    [
        ("parallel = dict(pipeline=4)\ndata = dict(micro_num=8)", ("1f1b", 8, 1)),
        (
            "parallel = dict(pipeline=4)\nmodel = dict(num_chunks=2)\ndata = dict(gradient_accumulation=8)",
            ("interleaved", 8, 2),
        ),
        ("parallel = dict(pipeline=dict(size=4, zero_bubble=True))", ("zero-bubble", 1, 1)),
        ("parallel = dict(pipeline=dict(size=4, mode='zbh1'))", ("zero-bubble", 1, 1)),
        ("parallel = dict(pipeline=dict(size=4, mode='1F1B'))", ("1f1b", 1, 1)),
    ],
)
def test_pipelines_have_schedule_micro_batches_and_chunks(tmp_path, text, division):
    assert tuple(load_config_text(tmp_path, text).division.values()) == division


def test_the_dtype_says_precision_and_whether_there_is_a_scale(tmp_path):
    text = "grad_scaler = dict(fp16=dict(initial_scale=2**10, min_scale=None), max_scale=2**12, hysteresis=0)\n"
    state = load_config_text(tmp_path, text).scaler().state_dict()
    assert (state["scale"], state["ceiling"], state["hysteresis"]) == (2**10, 2**12, 1)
    assert 0 < state["floor"] < 1e-30
    for dtype, precision in (("torch.float32", "fp32"), ("torch.tf32", "tf32")):
        config = load_config_text(tmp_path, f"{text}model = dict(dtype={dtype!r})")
        assert config.precision == Plan.preset(0, precision=precision).precision
        assert config.scaler().get_scale() == 1
        entry = next(e for e in config.translation.entries if e.path == "grad_scaler.fp16.initial_scale")
        assert entry.decision is Decision.NOTED


def test_a_mapping_is_taken_as_a_file_is_and_dtypes_as_they_are():
    values = {"model": {"dtype": torch.bfloat16}, "parallel": {"zero1": 4}}
    config = load(values)
    assert config.plan(16) == Plan.preset(1.5, precision="bf16", local_size=4)
    assert config.values is values
    with pytest.raises(ConfigError, match=r"a mapping.*'adam'"):
        load({"adm": {}})


def test_adam_without_a_key_is_refused_where_it_is_made(tmp_path):
    with pytest.raises(ConfigError, match=r"adam\.lr, adam\.adam_beta1"):
        load_config_text(tmp_path, "adam = dict(weight_decay=0.1)").adamw([])
