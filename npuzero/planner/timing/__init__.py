"""Time and memory of a training step on a cluster, computed from the engine's own schedule.

In: a TrainingJob, a TrainingRun and the work of a model's units. Out: an Estimate: bytes by memory, seconds by kind of
work, and the bottleneck. The schedule (steady_step.py) becomes a program of timed steps (program.py); a simulation runs
it on lanes (lanes.py); memory.py follows the same schedule together with activations.

Read estimate.py, clock.py and lanes.py first.
"""
