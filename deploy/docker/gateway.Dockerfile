# The gateway: gRPC and OpenAI-style HTTP for clients. `python -m gateway_svc.prepare` fetches the model's tokenizer first.
# Build from the root of the project: docker build -f deploy/docker/gateway.Dockerfile -t quire/gateway .
# The base is named by its digest, which stays what it is; a newer one: docs/operations.md, "Images".
ARG PYTHON_IMAGE=python:3.12.14-slim-bookworm@sha256:782412e85d0f0984994c290652577d4018aff08145c85b262bb63dc0c7522254
FROM ${PYTHON_IMAGE} AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY requirements requirements
COPY protos protos
COPY svc_common svc_common
COPY gateway_svc gateway_svc
RUN python -m venv /opt/quire \
    && PIP_NO_CACHE_DIR=1 sh requirements/install.sh /opt/quire/bin/python gateway .

FROM ${PYTHON_IMAGE}
COPY --from=build /opt/quire /opt/quire
ENV PATH=/opt/quire/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp \
    QUIRE_HOST=0.0.0.0
USER 10001:10001
WORKDIR /opt/quire
EXPOSE 8000 50051
ENTRYPOINT ["python", "-m", "gateway_svc"]
