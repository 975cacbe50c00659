"""Mutants of optimizers: step counts, groups, loss scaling."""

from __future__ import annotations

from .mutant import Mutant

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "neighbours in memory are updated by the rates of one group",
        "optim/adam.py",
        "if last.options is not part.options or (",
        "if (",
        ("world/test_parity.py::test_training_equals_plain_torch[four, clipped, two groups-2-zero1]",),
    ),
    Mutant(
        "where the device counts, parameters of several groups have the rate of one",
        "optim/adam.py",
        "(id(options), id(step) if counted else -cast(int, step))",
        "(0, id(step) if counted else -cast(int, step))",
        ("world/test_capturable.py::test_bits_over_cut_models",),
    ),
    Mutant(
        "the bias correction of a device's count is one step behind",
        "optim/adam.py",
        "self._steps.append(step + 1 if counted else step)",
        "self._steps.append(step)",
        ("world/test_capturable.py::test_bits_over_plain_parameters",),
    ),
    Mutant(
        "skipped steps count in the bias correction",
        "optim/scaler.py",
        "count.add_(1 if skip is None else skip[0].to(count.device) == 0)",
        "count.add_(1)",
        ("world/test_scaler.py::test_steps_counted_on_the_device",),
    ),
    Mutant(
        "a parameter that is not used in a step counts it, since it shares a count with those that are",
        "optim/scaler.py",
        "parting = {count for count, members in here.items() if members < self._sharing[count]}",
        "parting: set[int] = set()",
        ("world/test_scaler.py::test_steps_counted_on_the_device",),
    ),
    Mutant(
        "the loss scale grows one step late",
        "optim/scaler.py",
        "grows = window >= self.growth_interval",
        "grows = window > self.growth_interval",
        ("world/test_scaler.py::test_any_sequence_of_overflows_decides_as_torch",),
    ),
    Mutant(
        "the loss scale falls below its floor",
        "optim/scaler.py",
        ".clamp(min=self.floor)",
        "",
        ("world/test_scaler.py::test_hysteresis_and_floor",),
    ),
    Mutant(
        "a step that the scaler skips for cut models is taken",
        "api/scaler.py",
        "engine.skip_where(overflow.view(1).to(engine.space.device))",
        "pass",
        ("world/test_scaler.py::test_a_skipped_step_leaves_no_trace",),
    ),
    Mutant(
        "gradients update the shards of the step before's parameters",
        "api/adam.py",
        "if line is None or last != shards:",
        "if line is None:",
        ("world/test_behaviour.py::test_loops[units unused in some steps-zero1]",),
    ),
    Mutant(
        "the moments of a state that is dropped stay",
        "api/adam.py",
        "if state or flat in self._moments:",
        "if state:",
        ("checkpoint/test_contents.py::test_a_state_that_is_not_loaded_is_dropped",),
    ),
    Mutant(
        "a schedule of the learning rate is not seen by torch's optimizers over a cut model",
        "api/optimizer.py",
        'mirror.update((key, value) for key, value in group.items() if key != "params")',
        "pass",
        ("world/test_optimizers.py::test_schedules_groups_and_states",),
    ),
    Mutant(
        "torch's optimizers over a cut model take steps that a scaler would skip",
        "api/optimizer.py",
        "ready = [engine for engine in ready if engine.skip is None or not engine.skip.item()]",
        "ready = list(ready)",
        ("world/test_scaler.py::test_decisions_are_torchs",),
    ),
    Mutant(
        "clipping is not seen by torch's optimizers over a cut model",
        "api/optimizer.py",
        "                flat.own_gradient.mul_(engine.gradient_scale)\n",
        "                pass\n",
        ("world/test_scaler.py::test_decisions_are_torchs",),
    ),
    Mutant(
        "what a rank did not use counts as a zero gradient for torch's optimizers: its momentum goes on",
        "api/optimizer.py",
        "counts = engine in ready and engine.used(flat)[i]",
        "counts = engine in ready",
        ("world/test_optimizers.py",),
    ),
    Mutant(
        "step counts of other plain parameters go on where some have no gradient",
        "api/plain.py",
        'if shared is None or [id(state["step"]) for state in states] != [id(view) for view in views]:',
        "if shared is None or len(states) > len(views):",
        ("world/test_optimizers.py::test_drop_in_sees_what_changes_between_steps",),
    ),
    Mutant(
        "8-bit moments are taken over without their exponents",
        "ops/storage/__init__.py",
        "return [stored[own], stored[numel + first : numel + last]]",
        "return [stored[own], stored[numel + first : numel + last].clone()]",
        ("checkpoint/test_contents.py::test_masters_keep_their_bits_whatever_the_precision[bf16-8bit-bf16-8bit]",),
    ),
)
