# InternLM/InternEvo, configs/demo.py (Apache-2.0), over its base of 20B: what it says, written anew without comments.
from internlm.utils.utils import read_base

with read_base():
    from configs._base_.default_runtime import *
    from configs._base_.models.internlm2_20B import *

JOB_NAME = "20b_train"
DO_ALERT = False
SEQ_LEN = 2048
CHECKPOINT_EVERY = 50
ckpt = dict(
    enable_save_ckpt=False,
    save_ckpt_folder="local:llm_ckpts",
    load_ckpt_info=dict(path=None, content=("model",), ckpt_type="internevo"),
    auto_resume=False,
    checkpoint_every=CHECKPOINT_EVERY,
    async_upload=True,
    async_upload_tmp_folder="/dev/shm/internlm_tmp_ckpt/",
    oss_snapshot_freq=int(CHECKPOINT_EVERY / 2),
)
data = dict(
    seq_len=SEQ_LEN,
    micro_num=4,
    micro_bsz=2,
    valid_micro_num=4,
    valid_every=50,
    pack_sample_into_one=False,
    total_steps=50000,
    skip_batches="",
    rampup_batch_size="",
    min_length=50,
    train_folder=None,
    valid_folder=None,
    empty_cache_and_diag_interval=200,
    diag_outlier_ratio=1.1,
)
loss = dict(label_smoothing=0)
adam = dict(lr=1e-4, adam_beta1=0.9, adam_beta2=0.95, adam_beta2_c=0, adam_eps=1e-8, weight_decay=0.01)
lr_scheduler = dict(total_steps=data["total_steps"], init_steps=0, warmup_ratio=0.01, eta_min=1e-5, last_epoch=-1)
beta2_scheduler = dict(init_beta2=adam["adam_beta2"], c=adam["adam_beta2_c"], cur_iter=-1)
monitor = dict(
    alert=dict(
        enable_feishu_alert=DO_ALERT,
        feishu_alert_address=None,
        light_monitor_address=None,
        alert_file_path=f"llm_alter/{JOB_NAME}_alert.log",
    ),
    tensorboard=dict(queue_max_length=10),
)
use_fp32_norm = False
