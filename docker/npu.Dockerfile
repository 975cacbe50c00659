# npuzero on Ascend (Atlas A2 and A3; aarch64 and x86-64), on an image that has CANN:
#   docker build -f docker/npu.Dockerfile --build-arg CANN=<an image with CANN 8.1 or later and Python> -t npuzero-npu .
#   docker run --rm --device /dev/davinci0 --device /dev/davinci1 --device /dev/davinci_manager --device /dev/devmm_svm \
#       --device /dev/hisi_hdc -v /usr/local/Ascend/driver:/usr/local/Ascend/driver:ro npuzero-npu
# Building needs no NPU. Without further arguments the image runs `npuzero check --device npu`: send its report back.
# Binding tested with the real torch_npu over a fake CANN; not yet run on NPU hardware.
ARG CANN
FROM ${CANN}

# bash, since CANN's set_env.sh is written for it
SHELL ["/bin/bash", "-c"]
WORKDIR /opt/npuzero
COPY . .

# torch_npu of one release serves torch of the same; its wheels and torch's are there for both architectures
ARG TORCH=torch==2.13.0
ARG TORCH_NPU=torch_npu==2.13.0
ARG ASCEND_ENV=/usr/local/Ascend/ascend-toolkit/set_env.sh
ENV ASCEND_ENV=${ASCEND_ENV}
RUN python3 -m pip install --no-cache-dir ${TORCH} \
    && python3 -m pip install --no-cache-dir ${TORCH_NPU} pyyaml cmake

# Where CANN is found (ASCEND_HOME_PATH) the npu kernels are compiled as well
RUN source "${ASCEND_ENV}" && python3 -m pip install --no-cache-dir .

ENTRYPOINT ["/bin/bash", "-c", "source \"$ASCEND_ENV\" && exec \"$@\"", "npuzero"]
CMD ["npuzero", "check", "--device", "npu"]
