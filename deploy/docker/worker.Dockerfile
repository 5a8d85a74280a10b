# The worker, and `python -m worker_svc.prepare`, which prepares models. For CPU and CUDA: the build of torch that pip
# finds decides.
# Build from the root of the project: docker build -f deploy/docker/worker.Dockerfile -t quire/worker .
# The base is named by its digest, which stays what it is; a newer one: docs/operations.md, "Images".
ARG PYTHON_IMAGE=python:3.12.14-slim-bookworm@sha256:782412e85d0f0984994c290652577d4018aff08145c85b262bb63dc0c7522254
FROM ${PYTHON_IMAGE} AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY requirements requirements
COPY protos protos
COPY kernels kernels
COPY svc_common svc_common
COPY worker_svc worker_svc
# Additional package index of pip, to choose the build of torch.
ARG PIP_EXTRA_INDEX_URL=
RUN python -m venv /opt/quire \
    && PIP_NO_CACHE_DIR=1 sh requirements/install.sh /opt/quire/bin/python worker .

FROM ${PYTHON_IMAGE}
# Triton compiles a launcher in C for each kernel; on a CPU the kernels are C++, compiled for the machine.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/quire /opt/quire
ENV PATH=/opt/quire/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp \
    TRITON_CACHE_DIR=/tmp/triton \
    QUIRE_HOST=0.0.0.0
USER 10001:10001
WORKDIR /opt/quire
EXPOSE 50053 9102
ENTRYPOINT ["python", "-m", "worker_svc"]
