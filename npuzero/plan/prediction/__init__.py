"""Prediction of a step on one rank: its moves in the engine's order, and the bytes held and sent.

In: a plan, sizes of flat parameters, a mesh and a StepSpec. Out: a list of moves (step_schedule.py) and their sum, a
Report (predict.py). Read report.py, step_schedule.py and predict.py first.
"""
