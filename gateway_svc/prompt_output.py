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
        cls, rendering: Rendering, logprobs: Sequence[worker_pb2.TokenLogprobs], vocabulary: Vocabulary
    ) -> "PromptOutput":
        """From the log-probabilities as the scheduler sent them."""
        hidden_ids, special = vocabulary.hidden_ids(rendering.special_tokens), rendering.special_tokens
        detokenizer = Detokenizer(vocabulary, (), hidden_ids, joins=special is SpecialTokens.JOINED)
        text, offsets = "", []
        for token_id in rendering.prompt_token_ids:
            offsets.append(len(text))
            text += detokenizer.push(token_id)
        num_top = rendering.prompt_logprobs or 0
        scored = zip(rendering.prompt_token_ids[1:], logprobs, offsets[1:], strict=False)
        return cls(
            token_ids=rendering.prompt_token_ids,
            text=text + detokenizer.flush(),
            text_offsets=tuple(offsets),
            logprobs=tuple(TokenLogprob.from_proto(token_id, one, num_top, offset) for token_id, one, offset in scored),
        )

    def to_proto(self, vocabulary: Vocabulary) -> inference_pb2.Prompt:
        return inference_pb2.Prompt(
            token_ids=self.token_ids,
            text=self.text,
            logprobs=[logprob.to_proto(vocabulary) for logprob in self.logprobs],
        )
