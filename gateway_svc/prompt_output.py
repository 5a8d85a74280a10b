"""The prompt of a request, as it is returned to a client that asked for it."""

from collections.abc import Sequence
from dataclasses import dataclass

from gateway_svc.detokenizer import Detokenizer
from gateway_svc.output import TokenLogprob
from gateway_svc.rendering import Rendering
from gateway_svc.validated_request import SpecialTokens
from gateway_svc.vocabulary import Vocabulary
from quire.inference.v1 import inference_pb2
from quire.worker.v1 import worker_pb2


@dataclass(frozen=True, slots=True)
class PromptOutput:
    """The tokens of a prompt, their text, and the log-probability of each but the first, if they were requested.

    `text_offsets` are where the tokens begin in the text, in characters.
    """

    token_ids: tuple[int, ...]
    text: str
    text_offsets: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()

    @classmethod
    def of(
        cls,
        rendering: Rendering,
        logprobs: Sequence[worker_pb2.TokenLogprobs],
        vocabulary: Vocabulary,
        sent_text: str | None = None,
    ) -> "PromptOutput":
        """From the log-probabilities as the scheduler sent them. Without the text that the client sent, it is that of
        the tokens."""
        special = rendering.special_tokens if sent_text is None else SpecialTokens.JOINED
        hidden_ids = vocabulary.hidden_ids(special)
        detokenizer = Detokenizer(vocabulary, (), hidden_ids, joins=special is SpecialTokens.JOINED)
        pieces: list[str] = []
        offsets, num_chars = [], 0
        for token_id in rendering.prompt_token_ids:
            offsets.append(num_chars)
            pieces.append(detokenizer.push(token_id))
            num_chars += len(pieces[-1])
        text = "".join(pieces) + detokenizer.flush()
        if sent_text is not None:
            # Around it are tokens that the tokenizer adds; text like it may be in those before it.
            special_ids = vocabulary.hidden_ids(SpecialTokens.HIDDEN)
            placed = zip(rendering.prompt_token_ids, offsets, strict=True)
            first = next((offset for token_id, offset in placed if token_id not in special_ids), 0)
            begin = text.find(sent_text, first)
            if begin < 0:  # it begins with a special token itself
                begin = max(0, text.find(sent_text))
            offsets = [min(max(0, offset - begin), len(sent_text)) for offset in offsets]
            text = sent_text
        num_top = rendering.prompt_logprobs or 0
        scored = zip(rendering.prompt_token_ids[1:], logprobs, offsets[1:], strict=False)
        return cls(
            token_ids=rendering.prompt_token_ids,
            text=text,
            text_offsets=tuple(offsets),
            logprobs=tuple(TokenLogprob.from_proto(token_id, one, num_top, offset) for token_id, one, offset in scored),
        )

    def to_proto(self, vocabulary: Vocabulary) -> inference_pb2.Prompt:
        return inference_pb2.Prompt(
            token_ids=self.token_ids,
            text=self.text,
            logprobs=[logprob.to_proto(vocabulary) for logprob in self.logprobs],
        )
