# Builds npuzero from nothing but Python and g++, and runs its tests:
#   docker build -f docker/cpu.Dockerfile -t npuzero-cpu .
#   docker run --rm npuzero-cpu
FROM python:3.11-slim

RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ make \
    && rm -rf /var/lib/apt/lists/* \
    && useradd npuzero \
    && install -d -o npuzero /opt/npuzero

USER npuzero
WORKDIR /opt/npuzero
COPY --chown=npuzero . .
# --build-arg TORCH="torch==2.13.0 --index-url ..." takes a build without CUDA, where one is to be had
ARG TORCH=torch==2.13.0
RUN make .venv/.installed-dev TORCH="$TORCH"

CMD ["make", "test"]
