# InternLM/InternEvo, configs/_base_/default_runtime.py (Apache-2.0): what it says, written anew without comments.
cudnn_deterministic = False
cudnn_benchmark = False
enable_tb = True
grad_scaler = dict(
    fp16=dict(initial_scale=2**16, min_scale=1, growth_interval=1000),
    growth_factor=2,
    backoff_factor=0.5,
    max_scale=2**24,
    hysteresis=2,
)
