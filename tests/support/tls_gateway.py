"""A gateway with TLS on its ports, in the test's process, connected to a scripted scheduler."""

import shutil
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from certificates import Authority, Certificate
from gateway_harness import encoded, scheduler_model
from gateway_svc.gateway import Gateway
from gateway_svc.model_catalog import ModelCatalog
from gateway_svc.settings import GatewaySettings
from scripted_scheduler import ScriptedScheduler, answer_with, serving
from tiny_model import EOS

NAMES = ["DNS:localhost", "IP:127.0.0.1"]


@dataclass(frozen=True)
class ReplaceableFiles:
    """Files that a running gateway reads."""

    certificate: Path
    key: Path

    def replace_by(self, new: Certificate) -> None:
        """Replaces both, as an operator or Kubernetes does."""
        for old, source in ((self.certificate, new.certificate), (self.key, new.key)):
            draft = old.with_suffix(".draft")
            shutil.copy(source, draft)
            draft.replace(old)


@asynccontextmanager
async def gateway_with_tls(model: Path, files: ReplaceableFiles, **others: Any) -> AsyncIterator[Gateway]:
    """A ready gateway, whose scheduler answers "hello"."""
    async with serving(ScriptedScheduler(scheduler_model(model))) as scheduler:
        scheduler.script = answer_with(encoded("hello"), stop_token_id=EOS)
        values = {
            "http_port": 0,
            "grpc_port": 0,
            "schedulers_at": scheduler.address,
            "model": str(model),
            "served_model_name": "tiny",
            "drain_grace": 0,
            "insecure": True,
            "tls_cert_file": files.certificate,
            "tls_key_file": files.key,
        } | others
        settings = GatewaySettings.model_validate(values)
        gateway = Gateway(settings, ModelCatalog.load(settings.model_settings()))
        await gateway.start()
        try:
            yield gateway
        finally:
            await gateway.stop()


def trusting(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(authority.certificate))
