# Outrider for NVIDIA GPUs. From the root of the repository, with BuildKit:
#   docker build -f deploy/images/gpu.Dockerfile -t outrider:0.1.0-gpu .
# CUDA's libraries and nvcc come with torch's and FlashInfer's wheels, the driver (580 or newer) from the node.
# Without a registry: --build-arg BASE=..., any Debian with python3 (3.11 or newer) and python3-venv.
# Pin the base by digest where you build. Never built yet.
ARG BASE=python:3.12.11-slim-bookworm
FROM ${BASE} AS build
# vLLM's libraries want it where they are loaded.
RUN apt-get update && apt-get install -y --no-install-recommends libnuma1 && rm -rf /var/lib/apt/lists/*
ARG PIP_EXTRA_INDEX_URL
# The root file system of a container is read-only, so nothing is compiled later.
ENV UV_COMPILE_BYTECODE=1
WORKDIR /source
COPY . .
# What does not work is found by `outrider doctor` on a node: a build has no GPU to try it on.
RUN python3 -m venv /opt/outrider \
    && /opt/outrider/bin/python deploy/setup_environment.py --accelerator gpu --serving \
    && /opt/outrider/bin/python -m pip freeze > /opt/outrider/packages.txt

FROM ${BASE}
# bash and wget: KubeRay's own commands and probes. g++: what torch and Triton compile while they run.
RUN apt-get update && apt-get install -y --no-install-recommends bash g++ libnuma1 wget \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 1000 outrider && useradd --uid 1000 --gid 1000 --create-home outrider
COPY --from=build /opt/outrider /opt/outrider
ENV PATH=/opt/outrider/bin:$PATH \
    HOME=/home/outrider \
    XDG_CACHE_HOME=/home/outrider/.cache \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PYTHONUNBUFFERED=1 \
    RAY_worker_niceness=0
# By number, so that Kubernetes sees that it is not root. Written to: /tmp, /dev/shm, /home/outrider.
USER 1000:1000
WORKDIR /home/outrider
EXPOSE 8000 9000 9400
CMD ["outrider", "--help"]
