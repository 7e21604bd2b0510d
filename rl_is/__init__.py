"""rl_is: how policy-gradient training behaves when the data is off-policy.

Floors (a module imports only from floors below its own; tests parse this):
0 core, 1 ops and kernels, 2 objective / models / tasks / infra,
3 learner / rollout, 4 the commands in this folder.
"""

__version__ = "0.1.0"
