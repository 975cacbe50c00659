"""docs/it-does-not-fit.md: its figures are what `npuzero plan` says, and what autograd keeps."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

import npuzero
from npuzero.cli import main

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "it-does-not-fit.md").read_text("utf-8")
ROWS = re.findall(
    r"^\| [^|]+ \| `(stage=[^|]+)` \| (\d+) \| ([\d.]+) \| ([\d.]*) ?\|", PAGE, re.MULTILINE
)  # arguments of zero(), ranks, GiB a rank, what that buys
FAR_ROWS = re.findall(
    r"^\| `(stage=[^`]+offload=[^`]+)` \| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]*) ?\|",
    PAGE,
    re.MULTILINE,
)  # arguments of zero(), ranks, GiB on the device, on the host, on NVMe, seconds of the link, of the disk
TENSOR_ROWS = re.findall(
    r"^\| (\d) \| (\d) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]*) ?\|", PAGE, re.MULTILINE
)  # tensor ranks, stage, GiB a rank, of which buffers, GiB sent by ZeRO, by layers
WIDTH, BLOCKS, WORDS, TOKENS = 5120, 40, 32_000, 4096
GIB = 2**30


def planned_gib(arguments: str, ranks: str, capsys: pytest.CaptureFixture[str]) -> float:
    chosen = eval(f"dict({arguments})", {"npuzero": npuzero})
    options = ["--world", ranks, "--precision", chosen["precision"], "--json"]
    if "settings" in chosen:
        options += ["--prefetch", str(chosen["settings"].prefetch)]
    assert main(["plan", "--parameters", "13B", *options]) == 0
    held = json.loads(capsys.readouterr().out)["presets"][f"zero{chosen['stage']}"]["bytes_held"]
    return sum(held.values()) / GIB


def test_each_remedy_buys_what_the_plan_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(ROWS) == 8
    before = None
    for arguments, ranks, shown, bought in ROWS:
        now = planned_gib(arguments, ranks, capsys)
        assert shown == f"{now:.1f}", arguments
        assert bought == ("" if before is None else f"{before - now:.1f}"), arguments
        before = now


def test_over_tensor_ranks_a_rank_holds_and_sends_what_the_plan_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(TENSOR_ROWS) == 6
    for ranks, stage, *shown in TENSOR_ROWS:
        axes = ["--tensor", ranks, "--mode", "msp", "--tokens", "4096"] if ranks != "1" else []
        assert main(["plan", "--parameters", "13B", "--world", "8", *axes, "--json"]) == 0
        facts = json.loads(capsys.readouterr().out)
        row = facts["presets"][f"zero{stage}"]
        layers = [sum(sent.values()) for sent in facts.get("layers_bytes_sent", {}).values()]
        held, sent = row["bytes_held"], row["bytes_sent"]
        found = [sum(held.values()), held["buffers"], sum(sent.values()), *layers]
        assert [each for each in shown if each] == [f"{nbytes / GIB:.1f}" for nbytes in found], (ranks, stage)


def test_off_the_device_a_rank_holds_and_moves_what_the_plan_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(FAR_ROWS) == 6
    for arguments, ranks, *shown in FAR_ROWS:
        chosen = eval(f"dict({arguments})")
        offload = chosen["offload"]
        options = ["--world", ranks, "--precision", chosen["precision"], "--offload", offload, "--link", "25"]
        assert main(["plan", "--parameters", "13B", *options, *["--disk", "5"] * (offload == "nvme"), "--json"]) == 0
        row = json.loads(capsys.readouterr().out)["presets"][f"zero{chosen['stage']}+{offload}"]
        disk = f"{row['disk_seconds']:.2f}" if offload == "nvme" else ""
        gib = [f"{row['memory'][memory] / GIB:.1f}" for memory in ("device", "host", "nvme")]
        assert shown == [*gib, f"{row['link_seconds']:.2f}", disk], arguments


def test_the_question_is_answered_by_plan_and_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    block, logits = 46 * WIDTH * TOKENS, 12 * WORDS * TOKENS
    whole, checkpointed = (BLOCKS * block + logits) / GIB, (2 * BLOCKS * WIDTH * TOKENS + block + logits) / GIB
    split = {arguments: planned_gib(arguments, ranks, capsys) for arguments, ranks, *_ in ROWS if ranks == "8"}
    stage_2, stage_3, eight_bits = (
        split[f'stage={stage}, precision="{precision}"']
        for stage, precision in ((2, "bf16"), (3, "bf16"), (3, "bf16-8bit"))
    )
    for text, value in {
        "a rank takes {:.1f} of the 59.6 GiB": stage_3 + checkpointed,
        "takes {:.1f} GiB more": checkpointed,
        "`stage=2` takes {:.1f} GiB, ": stage_2 + checkpointed,
        "a sequence takes {:.1f} GiB of activations": whole,
        "that fits ({:.1f} GiB)": eight_bits + whole,
        "does not ({:.1f} GiB)": stage_3 + whole,
        "| {:.1f} GiB | | fused": whole - checkpointed,
        "with activation checkpointing {:.1f}.": checkpointed,
    }.items():
        assert text.format(value) in PAGE.replace("\n", " "), text.format(value)
    assert f"{64e9 / GIB:.1f}" == "59.6"


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable.:FutureWarning")
@pytest.mark.parametrize("checkpointing, nbytes", [(False, 46), (True, 2)])
def test_what_a_block_keeps_of_a_token(checkpointing: bool, nbytes: int) -> None:
    transformers = pytest.importorskip("transformers")
    tokens, width = 64, 320

    def kept_bytes(blocks: int) -> int:
        sizes = {"hidden_size": width, "intermediate_size": int(2.7 * width), "num_attention_heads": 4}
        config = transformers.LlamaConfig(
            vocab_size=64, num_hidden_layers=blocks, use_cache=False, attn_implementation="sdpa", **sizes
        )
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        kept: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        inputs = torch.zeros(1, tokens, dtype=torch.int64)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(input_ids=inputs, labels=inputs).loss
        assert loss.isfinite()
        return sum(kept.values())

    a_block = (kept_bytes(3) - kept_bytes(1)) / 2
    assert round(a_block / tokens / width) == nbytes
    assert f"keeps {nbytes} bytes" in PAGE or f"checkpointing {nbytes}, and" in PAGE
