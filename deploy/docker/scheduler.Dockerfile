# The scheduler: the queue and the block tables.
# Build from the root of the project: docker build -f deploy/docker/scheduler.Dockerfile -t quire/scheduler .
FROM python:3.12-slim-bookworm AS build
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY protos protos
COPY svc_common svc_common
COPY scheduler_svc scheduler_svc
RUN python -m venv /opt/quire \
    && /opt/quire/bin/pip install --no-cache-dir --constraint constraints.txt '.[scheduler]'

FROM python:3.12-slim-bookworm
COPY --from=build /opt/quire /opt/quire
ENV PATH=/opt/quire/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp \
    QUIRE_HOST=0.0.0.0
USER 10001:10001
WORKDIR /opt/quire
EXPOSE 50052 9101
ENTRYPOINT ["python", "-m", "scheduler_svc"]
