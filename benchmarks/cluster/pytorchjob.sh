#!/usr/bin/env bash
# Writes a PyTorchJob (Kubeflow's training operator) that runs the step and comm benchmarks; arguments go to the step.
#
#   IMAGE=... RESOURCE=nvidia.com/gpu benchmarks/cluster/pytorchjob.sh | kubectl apply -f -
#   IMAGE=... RESOURCE=huawei.com/Ascend910 NODES=2 benchmarks/cluster/pytorchjob.sh --dim 4096 | kubectl apply -f -
#   kubectl logs -f npuzero-bench-master-0
#
#   IMAGE      an image with a checkout of npuzero, installed, in FOLDER (/opt/npuzero), and with the accelerator's torch
#   RESOURCE   the devices' resource name; DEVICES of it per node (8)
#   NODES      pods (1)
#   SUITES, PIPE, TENSOR, DATA, LOCAL_SIZE, MESH_ARGUMENTS, TRAIN_ARGUMENTS   as for torchrun.sh, where they are set
#   NAME       of the job (npuzero-bench)
# The records lie in the master's FOLDER/runs/cluster and are printed at the end of its log.
set -euo pipefail
: "${IMAGE:?an image with npuzero}" "${RESOURCE:?such as nvidia.com/gpu or huawei.com/Ascend910}"
: "${NODES:=1}" "${DEVICES:=8}" "${NAME:=npuzero-bench}" "${FOLDER:=/opt/npuzero}"

variables=""
for name in SUITES PIPE TENSOR DATA LOCAL_SIZE MESH_ARGUMENTS TRAIN_ARGUMENTS; do
    if [[ -n ${!name:-} ]]; then
        variables+=$'\n'"                - {name: $name, value: \"${!name}\"}"
    fi
done
arguments=""
for argument in "$@"; do
    arguments+=", \"$argument\""
done

# A role with its number of pods. The operator sets MASTER_ADDR and MASTER_PORT, and RANK to the pod's number.
replicas() {
    cat <<YAML
    $1:
      replicas: $2
      restartPolicy: Never
      template:
        spec:
          containers:
            - name: pytorch
              image: "$IMAGE"
              workingDir: $FOLDER
              command:
                - bash
                - -c
                - NODE_RANK=\$RANK benchmarks/cluster/torchrun.sh "\$@" && find runs/cluster -name '*.json' -exec tail -n +1 {} +
              args: ["torchrun.sh"$arguments]
              env:
                - {name: NODES, value: "$NODES"}
                - {name: DEVICES, value: "$DEVICES"}$variables
              resources:
                limits: {"$RESOURCE": $DEVICES}
              volumeMounts:
                - {name: shared, mountPath: /dev/shm}
          volumes:
            - {name: shared, emptyDir: {medium: Memory}}
YAML
}

cat <<YAML
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata:
  name: $NAME
spec:
  pytorchReplicaSpecs:
YAML
replicas Master 1
if ((NODES > 1)); then
    replicas Worker $((NODES - 1))
fi
