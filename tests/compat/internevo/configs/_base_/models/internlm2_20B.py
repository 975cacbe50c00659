# InternLM/InternEvo, configs/_base_/models/internlm2_20B.py (Apache-2.0): what it says, written anew without comments.
model_type = "INTERNLM2_PUBLIC"
VOCAB_SIZE = 92544
HIDDEN_SIZE = 6144
NUM_ATTENTION_HEAD = 48
NUM_KV_ATTENTION_HEAD = 8
MLP_RATIO = 8 / 3
NUM_LAYER = 48
model = dict(
    num_chunks=1,
    checkpoint=1.0,
    dtype="torch.bfloat16",
    embed_split_hidden=True,
    num_layers=NUM_LAYER,
    hidden_size=HIDDEN_SIZE,
    vocab_size=VOCAB_SIZE,
    embed_grad_scale=1,
    parallel_output=True,
    num_attention_heads=NUM_ATTENTION_HEAD,
    num_kv_attention_heads=NUM_KV_ATTENTION_HEAD,
    mlp_ratio=MLP_RATIO,
    norm_type="rmsnorm",
    adapt_hf=True,
    apply_post_layer_norm=False,
    no_bias=True,
    layer_norm_epsilon=1e-5,
    rope_base=1000000,
)
hybrid_zero_optimizer = dict(
    overlap_sync_grad=True, overlap_sync_param=False, reduce_bucket_size=512 * 1024 * 1024, clip_grad_norm=1.0
)
parallel = dict(
    zero1=dict(size=16),
    tensor=dict(size=2, mode="fsp"),
    pipeline=dict(size=1, interleaved_overlap=True),
    weight=dict(size=1, overlap=True, memory_pool=True),
)
