"""Calls of a gateway over gRPC, and the errors that they end with."""

from typing import Any

import grpc
import pytest

from gateway_harness import Harness
from quire.inference.v1 import inference_pb2 as api


def asking(text: str = "hello", **fields: Any) -> api.StreamGenerateRequest:
    return api.StreamGenerateRequest(generation=api.Generation(text=text, **fields))


async def refused(call: Any) -> grpc.aio.AioRpcError:
    """The error with which a call, unary or streaming, ends."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await (consumed(call) if hasattr(call, "read") else call)
    return error.value


async def consumed(call: Any) -> list[Any]:
    """All messages of a stream."""
    return [message async for message in call]


def raw_call(quire: Harness, method: str) -> Any:
    """A method whose request is raw bytes."""
    return quire.channel.unary_stream(f"/quire.inference.v1.InferenceService/{method}")
