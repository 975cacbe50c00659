#!/usr/bin/env bash
# Everything that needs a GPU, on a machine with one where nothing need be installed; leaves records and logs in OUT.
#
#   benchmarks/cuda/judge.sh                     # about six minutes on an H100 with 16 cores
#   PARTS="build check" benchmarks/cuda/judge.sh
#
# Variables:
#   PARTS     of "build check measure step": the extension in place, for this GPU alone; the op tests on it, plain and under
#             compute-sanitizer, beside the tests marked gpu; ops against their goals; a GPT of 1.3 B parameters under zero3
#             in a world of one, beside the plain model
#   OUT       folder for records and logs (runs/cuda)
#   PYTHON    has torch, pybind11, cmake, ninja, pytest-xdist and hypothesis (python3)
set -uo pipefail
cd "$(dirname "$0")/../.."

: "${PARTS:=build check measure step}" "${OUT:=runs/cuda}" "${PYTHON:=python3}"
capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d .) || capability=
export CUDAARCHS="${CUDAARCHS:-${capability:-90}-real}" PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

build() { "$PYTHON" setup.py build_ext --inplace; }

# Three at a time: the references are the work, and they are the processor's.
check() { OMP_NUM_THREADS=1 make -j 3 --output-sync PY="$PYTHON" test-cuda sanitize-cuda; }

measure() { "$PYTHON" -m benchmarks.cuda --out "$OUT/ops.json"; }

# At a learning rate of 3e-4 the loss of so wide a model rises in its first step, and rounding decides by how much.
step() {
    "$PYTHON" -m benchmarks.step --ranks 1 --threads 4 --presets zero3 --dim 2048 --layers 24 --heads 16 --sequence 1024 \
        --batch 4 --lr 3e-5 --checked 2 --rounds 7 --out "$OUT/step.json"
}

mkdir -p "$OUT"
failed=
for part in $PARTS; do
    case $part in
        build | check | measure | step) ;;
        *) echo "PARTS: expected build, check, measure, step; got $part" >&2 && exit 2 ;;
    esac
    begin=$SECONDS
    "$part" 2>&1 | tee "$OUT/$part.log" || failed+=" $part"
    echo "== $part: $((SECONDS - begin)) s$([[ $failed == *" $part" ]] && echo ", failed")"
done
[[ -z $failed ]] || { echo "failed:$failed" >&2 && exit 1; }
