"""Mutants of thin wires in the engine and the plan."""

from __future__ import annotations

from .mutant import PackageMutant

THIN = "world/test_thin.py"
PRESET = f"{THIN}::test_a_preset_has_the_oracles_bits[thin-bf16-(2, 2)]"
CARRIED = f"{THIN}::test_any_plan_may_carry_thin_wires"
FEEDBACK = f"{THIN}::test_what_rounding_loses_is_added_the_next_time[hpz-all]"
RESTS = f"{THIN}::test_what_rests_is_never_rounded"
EDGES = "world/test_thin_edges.py"
LOAD = f"{EDGES}::test_feedback_begins_with_zeros_after_a_load"
WIRE = "unit/test_wire.py"
TRAFFIC = "world/test_traffic_memory.py"

MUTANTS = (
    PackageMutant(
        "a rank computes with its own exact shard beside the others' rounded ones",
        "shard/parameters/all_gather.py",
        "                ops.dequantize_sum(codes, self._whole, bits=self._bits, pieces=self._pieces)\n",
        "                own = self._whole.chunk(self._pieces)[0].clone()\n"
        "                ops.dequantize_sum(codes, self._whole, bits=self._bits, pieces=self._pieces)\n"
        "                self._whole.chunk(self._pieces)[0].copy_(own)\n",
        (PRESET,),
    ),
    PackageMutant(
        "a copy of rounded parameters is rounded again for backward",
        "shard/parameters/all_gather.py",
        "self._send(flat, *held, tag) if held else",
        "send(flat, *held, tag) if held else",
        (PRESET,),
    ),
    PackageMutant(
        "a program reads rounded parameters",
        "shard/parameters/all_gather.py",
        'rounds = unit.thin and purpose == "gather"',
        "rounds = unit.thin",
        (RESTS,),
    ),
    PackageMutant(
        "what is held of rounded parameters is what a program reads",
        "shard/parameters/full_parameters.py",
        "        if unit.rounded and not kept:\n",
        "        if False:\n",
        (RESTS,),
    ),
    PackageMutant(
        "writes among rounded values last",
        "shard/parameters/user_writes.py",
        "    if unit.rounded:\n",
        "    if False:\n",
        (f"{THIN}::test_a_write_among_rounded_values_is_refused",),
    ),
    PackageMutant(
        "what other ranks sent is not added to what earlier micro-batches brought",
        "shard/gradients/reduce_scatter.py",
        "rows=ranks, accumulate=adds)",
        "rows=ranks, accumulate=False)",
        (f"{CARRIED}[bf16-2-zero3]",),
    ),
    PackageMutant(
        "what rounding loses is never added",
        "shard/gradients/reduce_scatter.py",
        "residual = gradient.residuals.get(hop)",
        "residual = None",
        (FEEDBACK,),
    ),
    PackageMutant(
        "a block that was lost stays NaN where no parameter is, and every later step is skipped",
        "shard/gradients/reduce_scatter.py",
        "            if gradient.pools:\n                gradient.kept.zero_gaps()\n",
        "",
        (f"{EDGES}::test_a_block_that_was_lost_is_forgotten[zero1-torch.float32-1]",),
    ),
    PackageMutant(
        "a norm counts what feedback brings of a parameter that no rank has used",
        "shard/step/step_boundary.py",
        "        _zero_unused_gradients(self._used)\n",
        "",
        (f"{EDGES}::test_a_norm_has_nothing_of_gradients_that_no_rank_has[hpz]",),
    ),
    PackageMutant(
        "what rounding has lost outlives the loading of a checkpoint",
        "checkpoint/loading.py",
        "            drop_rounding_errors(flat.gradient)\n",
        "            pass\n",
        (f"{LOAD}[checkpoint]",),
    ),
    PackageMutant(
        "what rounding has lost outlives the loading of a state dict",
        "shard/parameters/full_parameters.py",
        "                drop_rounding_errors(flat.gradient)\n            for",
        "                pass\n            for",
        (f"{LOAD}[state dict]",),
    ),
    PackageMutant(
        "sums beyond the states' axes are gathered in the order in which they were scattered",
        "shard/gradients/reduce_scatter.py",
        "for hop, outer in zip(reversed(hops), reversed(parts), strict=True):",
        "for hop, outer in zip(hops, reversed(parts), strict=True):",
        (f"{CARRIED}[bf16-2-zero0]",),
    ),
    PackageMutant(
        "a rank takes another's part of a sum that all keep",
        "shard/gradients/reduce_scatter.py",
        "parts[-1].chunk(hop.group.size)[hop.group.index]",
        "parts[-1].chunk(hop.group.size)[-1 - hop.group.index]",
        (f"{CARRIED}[bf16-2-hsdp]",),
    ),
    PackageMutant(
        "blocks go over the end of a shard",
        "plan/table/precision.py",
        "return max((BLOCKS[each] for each in bits if each), default=1)",
        "return 1",
        (f"{WIRE}::test_a_precision_says_how_gradients_travel_along_each_axis",),
    ),
    PackageMutant(
        "two parameters share a scale where they share a flat, so the size of buckets moves bits",
        "plan/table/precision.py",
        "START_ELEMENTS, self.shard_elements)",
        "START_ELEMENTS, 1)",
        ("world/test_settings.py::test_a_setting_moves_no_bit_of_thin_presets[zero++]",),
    ),
    PackageMutant(
        "what is gathered thin is said to be sent as it is",
        "plan/prediction/step_schedule.py",
        "gather = replace(gather, nbytes=codes.nbytes)",
        "gather = replace(gather)",
        ("world/test_axes_bytes.py::test_a_rank_sends_along_each_axis_what_was_foretold[2-2-thin-bf16]",),
    ),
    PackageMutant(
        "a communication buffer is said to be lent until its codes have come",
        "plan/prediction/gradient_reductions.py",
        "begins = (AllocateBuffer(codes), *_free_moves(sent), AllocateBuffer(codes))\n"
        "            yield _make_reduction_stage(\n"
        "                collective, begins, (FreeBuffer(codes), *_allocate_moves(sums), FreeBuffer(codes))\n",
        "begins = (AllocateBuffer(codes), AllocateBuffer(codes))\n"
        "            yield _make_reduction_stage(\n"
        "                collective, begins, "
        "(*_free_moves(sent), FreeBuffer(codes), *_allocate_moves(sums), FreeBuffer(codes))\n",
        (f"{TRAFFIC}::test_wires_of_another_dtype[thin-hsdp]",),
    ),
    PackageMutant(
        "residuals are not counted",
        "plan/prediction/predict.py",
        'held[Memory.DEVICE, "states"] += count * kind.levels.residuals * torch.float32.itemsize\n',
        "pass\n",
        (f"{WIRE}::test_what_rounding_loses_is_held_with_the_states",),
    ),
    PackageMutant(
        "sums that all keep go between nodes first",
        "plan/table/wire.py",
        "levels_of(precision, axes[::-1], size) if any",
        "levels_of(precision, axes, size) if any",
        (f"{WIRE}::test_levels_follow_the_placement",),
    ),
    PackageMutant(
        "a message has no room for its scales",
        "plan/table/wire.py",
        "used = numel * bits // 8 + numel // BLOCKS[bits] * _SCALE_BYTES",
        "used = numel * bits // 8",
        (f"{WIRE}::test_a_message_has_the_bytes_that_kernels_write",),
    ),
)
