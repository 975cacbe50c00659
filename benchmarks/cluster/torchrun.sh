#!/usr/bin/env bash
# The step and comm benchmarks, or training over a mesh, on one node or on this node of several; node 0 leaves JSON in OUT.
#
#   benchmarks/cluster/torchrun.sh                                   # this host, its accelerators or 2 CPU ranks
#   DEVICES=8 benchmarks/cluster/torchrun.sh --dim 4096 --layers 32 --heads 32 --sequence 2048 --batch 1
#   NODES=2 NODE_RANK=$i MASTER_ADDR=node0 benchmarks/cluster/torchrun.sh    # the same on each of two nodes
#   DEVICES=8 SUITES=mesh PIPE=2 TENSOR=2 benchmarks/cluster/torchrun.sh      # a GPT over pipe 2 x data 2 x tensor 2
#
# Arguments go to `python -m benchmarks.step`, COMM_ARGUMENTS to `npuzero bench comm`. Variables, beside torchrun's usual ones:
#   DEVICES      ranks per node
#   SUITES       "step comm", some of them, or "mesh": examples/pipeline_gpt, to see all axes work between these devices,
#                or "train": examples/gpt, which saves checkpoints in OUT and goes on from the last one there
#   PIPE, TENSOR, DATA, LOCAL_SIZE   sizes of the mesh's axes, of the ranks on all nodes (see npuzero.mesh)
#   MESH_ARGUMENTS   more for the example, such as "--schedule interleaved --chunks 2 --preset zero3"
#   TRAIN_ARGUMENTS   of the other, such as "--preset zero3 --steps 5000 --checkpoint-every 200"
#   OUT          folder for the records (runs/cluster)
#   PYTHON       the interpreter npuzero is installed for (python)
#   ASCEND_ENV   CANN's set_env.sh (of /usr/local/Ascend/cann, else of ascend-toolkit there)
set -euo pipefail
cd "$(dirname "$0")/../.."

: "${NODES:=1}" "${NODE_RANK:=0}" "${MASTER_ADDR:=127.0.0.1}" "${MASTER_PORT:=29500}"
: "${SUITES:=step comm}" "${OUT:=runs/cluster}" "${PYTHON:=python}"

for folder in cann ascend-toolkit; do
    path=/usr/local/Ascend/$folder/set_env.sh
    if [[ -f $path ]]; then : "${ASCEND_ENV:=$path}"; fi
done
if [[ -f ${ASCEND_ENV:-} ]]; then
    set +u  # CANN's script reads variables that may be unset
    source "$ASCEND_ENV"
    set -u
fi
# For HCCL, wherever CANN's environment comes from. The first collective waits for the slowest rank's compilation; the
# default of 120 s is short on many nodes.
export HCCL_CONNECT_TIMEOUT="${HCCL_CONNECT_TIMEOUT:-1200}"
# npuzero waits a little longer than that (600 s if not told): HCCL's error says more.
export NPUZERO_TIMEOUT_S="${NPUZERO_TIMEOUT_S:-$((HCCL_CONNECT_TIMEOUT + 100))}"
# Contenders take turns on one NPU, each a process with communicators: every one needs ports of its own, of the host's
# (in place of those from HCCL_IF_BASE_PORT on) and of the NPU's (in place of 16666). All ranks must say the same.
export HCCL_HOST_SOCKET_PORT_RANGE="${HCCL_HOST_SOCKET_PORT_RANGE:-auto}"
export HCCL_NPU_SOCKET_PORT_RANGE="${HCCL_NPU_SOCKET_PORT_RANGE:-auto}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

read -r kind count < <("$PYTHON" -c 'from npuzero import device as d; k = d.choose(0).type; print(k, d.get(k).count())')
: "${DEVICES:=$([[ $kind == cpu ]] && echo 2 || echo "$count")}"

ranks() {
    "$PYTHON" -m torch.distributed.run --nnodes "$NODES" --node-rank "$NODE_RANK" --nproc-per-node "$DEVICES" \
        --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" "$@"
}

mesh=()
for axis in PIPE TENSOR DATA LOCAL_SIZE; do
    if [[ -n ${!axis:-} ]]; then
        option=${axis,,}
        mesh+=("--${option//_/-}" "${!axis}")
    fi
done

mkdir -p "$OUT"
for suite in $SUITES; do
    case $suite in
        step) ranks -m benchmarks.step --threads "$OMP_NUM_THREADS" --out "$OUT/step.json" "$@" ;;
        mesh) ranks examples/pipeline_gpt/train.py "${mesh[@]}" ${MESH_ARGUMENTS:-} ;;
        train)
            ranks examples/gpt/train.py --out "$OUT/gpt" --checkpoint-dir "$OUT/gpt/checkpoints" --resume ${TRAIN_ARGUMENTS:-}
            ;;
        comm) ranks -m npuzero bench comm --device "$kind" --out "$OUT" ${COMM_ARGUMENTS:-} ;;
        *) echo "SUITES: expected step, comm, mesh or train, got $suite" >&2 && exit 2 ;;
    esac
done
