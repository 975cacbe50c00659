"""Mutants of states and gradients that rest off the device."""

from __future__ import annotations

from .mutant import PackageMutant

ONE_RANK = "world/test_tiers.py::test_where_states_rest_moves_no_bit[zero0-bf16-1-many chunks-{'gradients': True}]"
HOME = "world/test_tiers.py::test_micro_batches_add_up_at_home"
AFTER = "world/test_tiers_lane.py::test_right_after_a_step"
FAILS = "world/test_tiers_lane.py::test_a_disk_that_fails_ends_training"
STEADY = "world/test_tiers_lane.py::test_a_steady_step_allocates_nothing"
AWAY = "world/test_offloaded.py"
LOADED = "checkpoint/test_memories.py::test_any_memory_goes_on_from_any_other"
BESIDE = "checkpoint/test_beside.py"
LATE = "world/test_delayed.py::"
RESTING = "world/test_resting.py::test_programs_do_as_with_parameters_on_the_device"

EARLY = "world/test_early.py::test_early_moves_no_bit"

MUTANTS = (
    PackageMutant(
        "an update begins inside a backward pass that is not the step's last",
        "shard/step/early_update.py",
        "0 < expected <= self._passes",
        "0 < expected",
        (f"{EARLY}[added at home]",),
    ),
    PackageMutant(
        "an update begins without a gradient that the step may yet bring",
        "shard/step/early_update.py",
        " and GradientContent.NOWHERE not in gradient.content",
        "",
        (f"{EARLY}[an absent gradient]",),
    ),
    PackageMutant(
        "a step whose update begins inside backward counts twice",
        "optim/workers/sharded_parameters.py",
        "lambda flat: list(self._steps_of(flat))",
        "self._steps_of",
        (f"{EARLY}[files]",),
    ),
    PackageMutant(
        "options that change after an update has begun are not looked at",
        "optim/rules/launch_offloaded.py",
        "return now == self._ranges[flat]",
        "return True",
        ("world/test_early.py::test_a_change_between_backward_and_step_is_told[changes_lr]",),
    ),
    PackageMutant(
        "backward computes with a parameter that is updated already",
        "shard/step/early_update.py",
        "        flat.note_write()\n",
        "",
        ("world/test_early.py::test_a_parameter_that_backward_still_needs_is_not_changed_unseen",),
    ),
    PackageMutant(
        "a forward goes on while a part of the model is updated",
        "shard/step/early_update.py",
        "        if self._begun:\n            self._update.hold()\n",
        "",
        ("world/test_early.py::test_who_comes_before_the_step_is_told[zero1]",),
    ),
    PackageMutant(
        "a unit computes with parameters that are still being updated",
        "shard/step/optimizer_update.py",
        "            self.stream.wait(first)\n",
        "",
        (f"{AFTER}[drops-gradients and states on the host]",),
    ),
    PackageMutant(
        "a parameter may be read while it is updated",
        "shard/step/optimizer_update.py",
        "        for unit in self._waiting:  # for the offloaded or another update\n            unit.close()\n",
        "",
        ("world/test_tiers_lane.py::test_a_parameter_is_read_when_it_is_updated",),
    ),
    PackageMutant(
        "zero_grad() takes the memory of gradients that the update still reads",
        "shard/step/optimizer_update.py",
        "if any(unit is waiting for waiting in self._waiting):",
        "if False:",
        (f"{AFTER}[drops-parameters in files, too]",),
    ),
    PackageMutant(
        "the update multiplies gradients by the scale that zero_grad() has reset",
        "memory/mover.py",
        "return taken, self._copy(taken, value, value)",
        "return value, ReadyHandle()",
        (f"{AFTER}[drops-gradients and states on the host]",),
    ),
    PackageMutant(
        "states are read while they are updated",
        "shard/offload/host_states.py",
        "        self._quiet()\n",
        "",
        (f"{AFTER}[shows_states-states in files]",),
    ),
    PackageMutant(
        "a step that the scaler skips changes what is far",
        "shard/offload/offloaded_update.py",
        "return self.skip is not None and self.skip.item() != 0",
        "return False",
        (ONE_RANK,),
    ),
    PackageMutant(
        "what a rule leaves out gets the parameters of another chunk",
        "optim/rules/launch_offloaded.py",
        "            if each.low is not None:\n"
        "                _round_outside_ranges(each.low, each.master, mine, begin)\n",
        "",
        (ONE_RANK,),
    ),
    PackageMutant(
        "a slot of the ring is filled while its last chunk is on its way to the disk",
        "shard/offload/offloaded_update.py",
        "            self._stored(turn - RING_SLOTS)\n",
        "            pass\n",
        ("world/test_tiers_lane.py::test_a_slot_is_filled_again_and_parameters_are_read_when_they_are_stored",),
    ),
    PackageMutant(
        "training writes over what a save beside it has yet to read",
        "shard/offload/nvme_extents.py",
        "away = self._keepers[ExtentLocation(k, 0)] > 0",
        "away = False",
        (f"{BESIDE}::test_what_is_saved_is_the_state_at_the_call[bf16-1-where0]",),
    ),
    PackageMutant(
        "an extent in its second place is written over while a second save has yet to read it",
        "shard/offload/nvme_extents.py",
        "(self._away.add if away else self._away.discard)(k)\n",
        "away = away or k in self._away\n            (self._away.add if away else self._away.discard)(k)\n",
        (f"{BESIDE}::test_what_is_saved_is_the_state_at_the_call[bf16-1-where0]",),
    ),
    PackageMutant(
        "the second place of what was saved is never given back",
        "shard/offload/nvme_extents.py",
        "needed = self._away or self._keepers.total()",
        "needed = True",
        (f"{BESIDE}::test_what_is_saved_is_the_state_at_the_call[bf16-1-where0]",),
    ),
    PackageMutant(
        "a save that fails keeps what it has not read",
        "checkpoint/saving.py",
        "                done()\n",
        "                pass\n",
        (f"{BESIDE}::test_a_disk_that_fails_while_a_save_reads_it_is_told_and_training_goes_on",),
    ),
    PackageMutant(
        "a save brings all of a shard to memory",
        "checkpoint/layout/parts.py",
        "sites(begin, end, ITEM_BYTES // cut.dtype.itemsize)",
        "sites(begin, end)",
        ("checkpoint/test_streams.py::test_no_more_than_a_few_pieces_are_in_memory",),
    ),
    PackageMutant(
        "what is written outside of an update does not reach the disk",
        "shard/offload/nvme_states.py",
        "        self._written = self._written or write\n",
        "",
        (f"{LOADED}[drawn-host-files]",),
    ),
    PackageMutant(
        "micro-batches are added to what the buffer had before",
        "shard/state/gradient_buffer.py",
        "            self._mover.to_device(self.buffer, self.homes[0]).wait()\n",
        "",
        (f"{HOME}[zero3-drawn-2-many chunks-{{'gradients': True}}]",),
    ),
    PackageMutant(
        "chunks after one that failed are updated",
        "shard/offload/offloaded_update.py",
        "        if self.failed is not None:\n            raise self.failed\n        observe",
        "        observe",
        (f"{FAILS}[True]",),
    ),
    PackageMutant(
        "R4 of what is far counts for no step",
        "shard/layout/traffic_meter.py",
        '"restore": self.restored}',
        '"restored": self.restored}',
        ("world/test_tiers.py::test_what_is_read_between_steps_changes_no_report",),
    ),
    PackageMutant(
        "each step makes a ring of its own",
        "shard/offload/offloaded_update.py",
        "if self._staging or not self.chunks or self._on_device or self._lag:",
        "if not self.chunks or self._on_device or self._lag:",
        (f"{STEADY}[gradients and states on the host]",),
    ),
    PackageMutant(
        "a delayed update reads gradients of the step that runs beside it",
        "shard/state/gradient_buffer.py",
        "                self.homes.reverse()\n",
        "",
        (f"{LATE}test_neither_forward_nor_backward_waits_for_the_update",),
    ),
    PackageMutant(
        "backward waits for a delayed update",
        "shard/step/step_boundary.py",
        "used=self._stage is BoundaryPhase.STEPPED and some",
        "used=True",
        (f"{LATE}test_neither_forward_nor_backward_waits_for_the_update",),
    ),
    PackageMutant(
        "a step brings parameters to the device that are still being updated",
        "shard/offload/delayed_update.py",
        "        self.quiet()\n        self._mover.follow()\n",
        "        self._mover.follow()\n",
        (f"{LATE}test_right_after_a_step[shows_parameters-Memory.HOST]",),
    ),
    PackageMutant(
        "gradients that are added to after a step change under its delayed update",
        "shard/step/optimizer_update.py",
        "if used or not self._lag:",
        "if not self._lag:",
        (f"{LATE}test_right_after_a_step[keeps-Memory.HOST]",),
    ),
    PackageMutant(
        "a checkpoint of a delayed plan goes on with parameters that the update has changed",
        "optim/optimizer.py",
        "return names + [LAGGING] * engine.lag.expect(flat, slots)",
        "return names",
        (f"{LATE}test_a_checkpoint_goes_on_as_if_nothing_had_been[8 bits]",),
    ),
    PackageMutant(
        "what a program writes is undone by the update that is pending",
        "shard/parameters/user_writes.py",
        "        self._lag.check_write(flat)\n",
        "",
        (f"{LATE}test_parameters_are_written_when_nothing_is_pending[zero2]",),
    ),
    PackageMutant(
        "export leaves out the last step's update",
        "checkpoint/weight_files/export.py",
        "if flat.ahead is not None and not exact:",
        "if False:",
        (f"{LATE}test_exported_is_what_the_last_step_made",),
    ),
    PackageMutant(
        "a model whose update failed stays, with its files, when it is dropped",
        "device/lane.py",
        "            del handle  # its error's traceback refers to the frames of all waiting callers\n",
        "",
        ("faults/test_disks.py::test_a_disk_that_fails_in_an_update[a full disk-0]",),
    ),
    PackageMutant(
        "what leaves the device keeps its memory",
        "memory/evacuation.py",
        "            block.give()\n",
        "            pass\n",
        (f"{AWAY}::test_memory_goes_and_what_a_program_has_views_of_comes_back",),
    ),
    PackageMutant(
        "a model is used while its training state is away",
        "shard/parameters/all_gather_updated.py",
        "        if self.refusal is not None:\n",
        "        if False:\n",
        (f"{AWAY}::test_what_needs_the_state_says_so[0]",),
    ),
    PackageMutant(
        "states that torch's optimizers have made stay on the device",
        "shard/offload_model.py",
        '            *find_foreign_buffers(states, "states"),\n',
        "",
        (f"{AWAY}::test_states_of_torchs_optimizers_are_counted",),
    ),
    PackageMutant(
        "what was read for an update is taken although the program has written since",
        "shard/offload/nvme_states.py",
        "        self._foreseen.clear()  # a write makes prefetched chunks stale, and this uses slot 0\n",
        "",
        ("world/test_tiers_lane.py::test_what_an_update_reads_first_is_read_when_the_one_before_is_done",),
    ),
    PackageMutant(
        "chunks are updated in the order in which their gradients come",
        "shard/offload/offloaded_update.py",
        "from queue import PriorityQueue\n",
        "from queue import Queue as PriorityQueue\n",
        ("world/test_early.py::test_what_the_next_forward_wants_first_is_updated_first",),
    ),
    PackageMutant(
        "a slot is read into while it is stored",
        "shard/offload/offloaded_update.py",
        "        for handle in self.storing.get(turn, ()):\n            handle.wait()\n",
        "",
        ("world/test_tiers_lane.py::test_a_slot_is_filled_again_and_parameters_are_read_when_they_are_stored",),
    ),
    PackageMutant(
        "a sum of the pass before lets an update begin",
        "shard/gradients/reduce_scatter.py",
        "        if number == self._number:  # else an earlier pass launched it; this one may add to it\n",
        "        if True:\n",
        (f"{EARLY}[a sum under way]",),
    ),
    PackageMutant(
        "parameters are read from a disk while they are on their way there",
        "shard/offload/offloaded_update.py",
        "                yield from job.landing(k)\n",
        "                pass\n",
        ("world/test_tiers_lane.py::test_a_slot_is_filled_again_and_parameters_are_read_when_they_are_stored",),
    ),
    PackageMutant(
        "parameters that were read ahead are taken although they were written since",
        "shard/offload/load_parameters.py",
        "if read is not None and read.versions == versions:",
        "if read is not None:",
        ("world/test_resting.py::test_what_was_read_ahead_and_written_since_is_read_again",),
    ),
    PackageMutant(
        "what a program writes outside of updates does not reach the file of parameters",
        "shard/offload/nvme_parameters.py",
        "        self.settle()\n",
        "",
        (f"{RESTING}[an average copied back-NVME]",),
    ),
    PackageMutant(
        "a chunk's parameters that are not updated are replaced by what lay in the ring",
        "shard/offload/nvme_parameters.py",
        "return self._read[k] or not every",
        "return self._read[k]",
        (f"{RESTING}[parameters that are frozen later-NVME]",),
    ),
    PackageMutant(
        "parameters that rest off the device stay there after forward",
        "shard/layout/shard_specs.py",
        "            return not held.far\n",
        "            return True\n",
        ("world/test_tiers.py::test_report_equals_predict",),
    ),
)
