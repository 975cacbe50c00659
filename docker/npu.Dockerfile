# npuzero on Ascend (Atlas A2 and A3; aarch64 and x86-64), on an image that has CANN:
#   docker build -f docker/npu.Dockerfile --build-arg CANN=<an image with CANN 9.1 and Python> -t npuzero-npu .
#   docker run --rm --device /dev/davinci0 --device /dev/davinci1 --device /dev/davinci_manager --device /dev/devmm_svm \
#       --device /dev/hisi_hdc -v /usr/local/Ascend/driver:/usr/local/Ascend/driver:ro -v "$PWD":/report npuzero-npu
# Building needs no NPU. Without further arguments the image runs `npuzero check --device npu` and leaves report.json in
# the folder it was started from: send it back.
# Binding tested with the real torch_npu over a fake CANN; not yet run on NPU hardware.
ARG CANN
FROM ${CANN}

# bash, since CANN's set_env.sh is written for it
SHELL ["/bin/bash", "-c"]
WORKDIR /opt/npuzero
COPY . .

# torch_npu of one release serves torch of the same, and goes with one CANN: docs/npu.md, Versions. With CANN 8.5:
#   --build-arg TORCH=torch==2.9.0 --build-arg TORCH_NPU=torch_npu==2.9.0
ARG TORCH=torch==2.13.0
ARG TORCH_NPU=torch_npu==2.13.0
RUN python3 -m pip install --no-cache-dir ${TORCH} \
    && python3 -m pip install --no-cache-dir ${TORCH_NPU} pyyaml cmake

# CANN's environment, where its installers put it since 8.5 and before, or where ASCEND_ENV says
ARG ASCEND_ENV
RUN for path in "${ASCEND_ENV}" /usr/local/Ascend/{cann,ascend-toolkit}/set_env.sh; do \
        [[ -f $path ]] && printf 'source %q\n' "$path" > /opt/cann.sh && exit; \
    done; echo "no CANN in this image" >&2; exit 1

# pip goes on where the npu kernels cannot be compiled, and leaves a file that says why; an image without them is none
RUN source /opt/cann.sh && python3 -m pip install --no-cache-dir . \
    && kernels=$(python3 -c 'import sysconfig; print(sysconfig.get_path("platlib"))')/npuzero/kernels \
    && { ls "$kernels"/*.so || { cat "$kernels"/*.txt; exit 1; }; }

ENTRYPOINT ["/bin/bash", "-c", "source /opt/cann.sh && exec \"$@\"", "npuzero"]
CMD ["npuzero", "check", "--device", "npu", "--out", "/report"]
