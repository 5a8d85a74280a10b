"""How long work on requests and answers takes, in microseconds, as far as its size shows that.

Work on the event loop delays the tokens of all streams. What takes longer than `LONG` is done in a thread instead, by
`TenantThreads.run_if_long`, or in parts, by `LoopYield`. The way to a thread and back takes about 100 µs.
"""

from typing import Final

LONG: Final = 1024.0

# To read a request
BODY_BYTE = 1 / 32  # of JSON that is parsed and checked by a model: 16 MiB take 0.5 s
CHAT_ITEM = 16.0  # a message, call or tool of a chat over gRPC
CONVERSATION_ITEM = 32.0  # of the Responses API
MESSAGE_CHECK = 4.0  # of a message without calls
FORM_CHARACTER = 1 / 32  # of tools and constraints, for their digest

# To make requests of the prompts of a call
PROMPT = 32.0  # beside its tokens
PROMPT_TOKEN = 0.5

# To make an answer
LOGPROB = 8.0
EVENT = 8.0  # of a chunk, beside its log-probabilities: 1 to 20
MERGED_CHUNK = 1.0  # a chunk that becomes part of a whole answer
RESPONSE_TOKEN = 50.0  # the events of one token of the Responses API
ATTACHMENT_BYTE = 1 / 64  # of what is stored with a response
JSON_VALUE = 1 / 8  # two million take 0.25 s
TEXT_CHARACTER = 1 / 64  # of a text of the request
PROMPT_TEXT_TOKEN = 0.5  # of a prompt whose text or tokens a choice has
VECTOR_NUMBER = 0.027  # of a vector that becomes a message


def values_cost(num_values: int, num_characters: int = 0) -> float:
    """Of an answer of values, with so many characters of the request."""
    return JSON_VALUE * num_values + TEXT_CHARACTER * num_characters


def answer_cost(num_logprobs: int, num_chunks: int = 0, num_prompt_tokens: int = 0) -> float:
    """Of a whole answer, whose choices have so many tokens of prompts."""
    return LOGPROB * num_logprobs + MERGED_CHUNK * num_chunks + PROMPT_TEXT_TOKEN * num_prompt_tokens
