# The gateway: gRPC and OpenAI-style HTTP for clients. `python -m gateway_svc.prepare` fetches the model's tokenizer first.
# Build from the root of the project: docker build -f deploy/docker/gateway.Dockerfile -t quire/gateway .
FROM python:3.12-slim-bookworm AS build
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY protos protos
COPY svc_common svc_common
COPY gateway_svc gateway_svc
RUN python -m venv /opt/quire \
    && /opt/quire/bin/pip install --no-cache-dir --constraint constraints.txt '.[gateway]'

FROM python:3.12-slim-bookworm
COPY --from=build /opt/quire /opt/quire
ENV PATH=/opt/quire/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp \
    QUIRE_HOST=0.0.0.0
USER 10001:10001
WORKDIR /opt/quire
EXPOSE 8000 50051
ENTRYPOINT ["python", "-m", "gateway_svc"]
