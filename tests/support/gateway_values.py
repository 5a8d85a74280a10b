"""Values for tests of the gateway: tokenizers of the kinds that models come with, and requests."""

import json
from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from gateway_svc.rendering import Rendering
from gateway_svc.sampling_fields import SAMPLING_FIELDS
from gateway_svc.stop_strings import StopString
from gateway_svc.validated_request import (
    BeamSearchParams,
    Echo,
    OnDisconnect,
    Sampling,
    SpecialTokens,
    Stopping,
    StopText,
    ValidatedRequest,
)
from gateway_svc.vocabulary import Vocabulary
from tiny_model import tiny_tokenizer


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """A vocabulary, as the gateway makes it from tokenizer.json."""
    return Vocabulary(tokenizer, json.loads(tokenizer.to_str())["decoder"])


def sentencepiece_tokenizer() -> Tokenizer:
    """A tokenizer as in Llama 2: spaces as ▁, unknown characters as bytes, the first space of a text stripped."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "▁b", "é"]
    tokenizer = Tokenizer(
        models.BPE(vocab={piece: place for place, piece in enumerate(pieces)}, merges=[("▁", "a"), ("▁", "b")])
    )
    tokenizer.add_special_tokens([AddedToken(piece, special=True) for piece in pieces[:3]])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def metaspace_tokenizer() -> Tokenizer:
    """A tokenizer as in T5."""
    pieces = ["<pad>", "▁", "a", "b", "▁a", "▁é", "é"]
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0))
    tokenizer.add_special_tokens([AddedToken("<pad>", special=True)])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def wordpiece_tokenizer() -> Tokenizer:
    """A tokenizer as in BERT."""
    pieces = ["[UNK]", "[CLS]", "a", "##a", "b", "##b", ".", "é"]
    tokenizer = Tokenizer(models.WordPiece({piece: place for place, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.add_special_tokens([AddedToken("[CLS]", special=True)])
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def added_tokens_tokenizer() -> Tokenizer:
    """A byte-level tokenizer with added tokens that are not special, one of them outside the byte alphabet."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False), AddedToken("｜tool｜", special=False)])
    return tokenizer


def id_of(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that exists."""
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None
    return token_id


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": tiny_tokenizer,
    "byte level with added tokens": added_tokens_tokenizer,
    "sentencepiece": sentencepiece_tokenizer,
    "metaspace": metaspace_tokenizer,
    "wordpiece": wordpiece_tokenizer,
}


def make_rendering(vocabulary: Vocabulary | None = None, **fields: Any) -> Rendering:
    """The rendering options of `make_generation(**fields)`."""
    return Rendering.of(make_generation(**fields), vocabulary or vocabulary_of(tiny_tokenizer()))


def make_generation(
    *,
    prompt_token_ids: list[int] | None = None,
    stop: tuple[str, ...] = (),
    min_tokens: int = 0,
    stop_text: StopText = StopText.EXCLUDED,
    special_tokens: SpecialTokens = SpecialTokens.HIDDEN,
    on_disconnect: OnDisconnect = OnDisconnect.CANCEL,
    n: int = 1,
    best_of: int | None = None,
    beam_search: BeamSearchParams | None = None,
    logprobs: int | None = None,
    logprob_token_ids: tuple[int, ...] = (),
    prompt_logprobs: int | None = None,
    echo: Echo = Echo.ABSENT,
    omits_output: bool = False,
    seed: int = 7,
    stop_token_ids: tuple[int, ...] = (),
    request_id: str = "some-id",
) -> ValidatedRequest:
    """A request with defaults for the fields that a test does not set."""
    sampling = Sampling({one.name: one.default for one in SAMPLING_FIELDS}, seed, {})
    stops = tuple(StopString.compile(text) for text in stop)
    stopping = Stopping(100, min_tokens, stops, stop_token_ids, (2,), stop_text)
    prompt = [5] if prompt_token_ids is None else prompt_token_ids
    return ValidatedRequest(
        request_id=request_id,
        on_disconnect=on_disconnect,
        model="tiny",
        prompt_token_ids=prompt,
        sampling=sampling,
        stopping=stopping,
        n=n,
        best_of=n if best_of is None else best_of,
        beam_search=beam_search,
        logprobs=logprobs,
        logprob_token_ids=logprob_token_ids,
        prompt_logprobs=prompt_logprobs,
        echo=echo,
        omits_output=omits_output,
        priority=0,
        special_tokens=special_tokens,
    )
