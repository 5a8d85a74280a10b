"""transformers' continuous batching as an HTTP server: OpenAI's streaming completions, greedy, of exact lengths.

    python -m benchmarks.serving.continuous_batching --model DIRECTORY --name NAME --port PORT

The generation loop is transformers' own ContinuousBatchingManager, in bfloat16 over torch's SDPA; this file only
passes token ids in and text out. Batches have at most as many tokens as Quire's steps on a CPU, and the cache has the
size of vLLM's: by default transformers takes most of the memory, and makes masks of that size.
"""

import argparse
import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

KV_BYTES = 2 * 2**30  # the size of vLLM's cache


@dataclass
class Completions:
    """The HTTP routes."""

    manager: Any
    tokenizer: Tokenizer
    name: str
    routes: list[Route] = field(init=False)

    def __post_init__(self) -> None:
        self.routes = [
            Route("/v1/models", self.models),
            Route("/v1/completions", self.completions, methods=["POST"]),
        ]

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": self.name, "object": "model"}]})

    async def completions(self, request: Request) -> Response:
        """A stream of text, and the usage at its end."""
        body = await request.json()
        return StreamingResponse(self._stream(body["prompt"], body["max_tokens"]), media_type="text/event-stream")

    async def _stream(self, prompt: list[int], max_tokens: int) -> AsyncIterator[str]:
        results: asyncio.Queue[Any] = asyncio.Queue()
        request_id = uuid4().hex
        self.manager.register_result_handler(request_id, results.put_nowait)
        accepted = self.manager.add_request(
            prompt, request_id=request_id, max_new_tokens=max_tokens, streaming=True, eos_token_id=-1
        )
        if accepted is None:
            yield _event({"error": {"message": "the generation loop has ended"}})
            return
        decoder = DecodeStream(skip_special_tokens=False)
        num_tokens = 0
        is_finished = False
        while not is_finished:
            result = await results.get()
            if result.error is not None:
                yield _event({"error": {"message": str(result.error)}})
                return
            is_finished = result.is_finished()
            new = result.generated_tokens[num_tokens:]
            num_tokens += len(new)
            text = "".join(piece for token in new if (piece := decoder.step(self.tokenizer, token)) is not None)
            if text:
                yield _event({"choices": [{"index": 0, "text": text}]})
        usage = {"prompt_tokens": len(prompt), "completion_tokens": num_tokens}
        yield _event({"choices": [], "usage": usage})
        yield "data: [DONE]\n\n"


def make_manager(path: Path, max_batch_tokens: int) -> Any:
    """The generation loop over the model of a directory, not started."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="sdpa")
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * model.dtype.itemsize
    greedy: Any = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)  # type: ignore[no-untyped-call]
    batching = ContinuousBatchingConfig(max_batch_tokens=max_batch_tokens)
    batching.num_blocks = KV_BYTES // (token_bytes * batching.page_size)
    return model.init_continuous_batching(generation_config=greedy, continuous_batching_config=batching)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="model directory")
    parser.add_argument("--name", required=True, help="what the model is called")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--batch-tokens", type=int, default=512, help="tokens in a batch; default 512")
    options = parser.parse_args()
    manager = make_manager(options.model, options.batch_tokens)
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    manager.start()
    try:
        app = Starlette(routes=Completions(manager, tokenizer, options.name).routes)
        uvicorn.run(app, host="127.0.0.1", port=options.port, log_level="warning")
    finally:
        manager.stop(hard_stop=True)


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


if __name__ == "__main__":
    main()
