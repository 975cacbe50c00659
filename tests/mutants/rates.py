"""Mutants of schedules of the learning rate."""

from __future__ import annotations

from .mutant import PackageMutant

TESTS = "unit/test_schedules.py::"

MUTANTS: tuple[PackageMutant, ...] = (
    PackageMutant(
        "DeepSpeed's schedules are a step ahead of DeepSpeed",
        "schedules/deepspeed.py",
        "return self.last_epoch - 1",
        "return self.last_epoch",
        (f"{TESTS}test_a_warm_up_ends_at_the_greatest_rate",),
    ),
    PackageMutant(
        "a cosine goes up again behind its end",
        "schedules/deepspeed.py",
        "min(1.0, (iteration - self.warmup_num_steps + 1) / steps)",
        "(iteration - self.warmup_num_steps + 1) / steps",
        (f"{TESTS}test_a_cosine_scales_the_optimizers_own_rates",),
    ),
    PackageMutant(
        "one cycle begins with the greatest momentum",
        "schedules/deepspeed.py",
        "if iteration < 0:  # the optimizer's first step, in which the rate is also the minimum",
        "if iteration < -1:",
        (f"{TESTS}test_one_cycle_goes_up_and_down_once_and_decays",),
    ),
    PackageMutant(
        "the warm-up of a fine-tuning begins at once",
        "schedules/internevo.py",
        "warmed = self.last_epoch + 1 - self.init_steps",
        "warmed = self.last_epoch + 1",
        (f"{TESTS}test_fine_tuning_waits_warms_up_and_follows_a_cosine",),
    ),
    PackageMutant(
        "the second beta forgets its steps when training resumes",
        "schedules/internevo.py",
        "self.init_beta2, self.c, self.cur_iter = (state_dict[name] for name in self.state_dict())",
        'self.init_beta2, self.c = state_dict["init_beta2"], state_dict["c"]',
        (f"{TESTS}test_the_second_beta_grows_with_the_steps",),
    ),
)
