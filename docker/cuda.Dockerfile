# npuzero with CUDA kernels, and its tests. BASE is an image with nvcc 12.1 or later and Python 3.10 or later:
#   docker build -f docker/cuda.Dockerfile --build-arg BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04 -t npuzero-cuda .
#   docker run --rm --gpus all npuzero-cuda
ARG BASE
FROM ${BASE}

RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ make python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && useradd npuzero \
    && install -d -o npuzero /opt/npuzero

USER npuzero
WORKDIR /opt/npuzero
COPY --chown=npuzero . .
ARG TORCH=torch==2.13.0
RUN make .venv/.installed-dev TORCH="$TORCH"

CMD ["make", "test"]
