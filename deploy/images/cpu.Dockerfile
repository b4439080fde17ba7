# Outrider for processors. From the root of the repository, with BuildKit:
#   docker build -f deploy/images/cpu.Dockerfile -t outrider:0.1.0-cpu .
# Where the package index does not carry PyTorch's CPU build: --build-arg UV_TORCH_BACKEND=cpu.
# Without a registry: --build-arg BASE=..., any Debian with python3 (3.11 or newer) and python3-venv.
# Pin the base by digest where you build.
ARG BASE=python:3.12.11-slim-bookworm
FROM ${BASE} AS build
# vLLM's libraries want it where they are loaded.
RUN apt-get update && apt-get install -y --no-install-recommends libnuma1 && rm -rf /var/lib/apt/lists/*
ARG UV_TORCH_BACKEND
ARG PIP_EXTRA_INDEX_URL
# The root file system of a container is read-only, so nothing is compiled later.
ENV UV_COMPILE_BYTECODE=1
WORKDIR /source
COPY . .
RUN python3 -m venv /opt/outrider \
    && /opt/outrider/bin/python deploy/setup_environment.py --accelerator cpu --serving \
    && /opt/outrider/bin/python -m pip freeze > /opt/outrider/packages.txt \
    && cd / && /opt/outrider/bin/python -c "import outrider.deploy.app, vllm"

FROM ${BASE}
# bash and wget: KubeRay's own commands and probes. g++ and python3-dev: vLLM's CPU build compiles with Python's headers
# while it runs.
RUN apt-get update && apt-get install -y --no-install-recommends bash g++ libnuma1 python3-dev wget \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 1000 outrider && useradd --uid 1000 --gid 1000 --create-home outrider
COPY --from=build /opt/outrider /opt/outrider
ENV PATH=/opt/outrider/bin:$PATH \
    HOME=/home/outrider \
    XDG_CACHE_HOME=/home/outrider/.cache \
    PYTHONUNBUFFERED=1 \
    RAY_worker_niceness=0
# By number, so that Kubernetes sees that it is not root. Written to: /tmp, /dev/shm, /home/outrider.
USER 1000:1000
WORKDIR /home/outrider
EXPOSE 8000 9000 9400
CMD ["outrider", "--help"]
