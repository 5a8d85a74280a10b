"""Bodies and answers of /classify, as vLLM has them."""

from typing import ClassVar, Literal

from pydantic import Field

from gateway_svc.http_api.answer_model import AnswerModel
from gateway_svc.http_api.body_model import Neutral, Notes, option
from gateway_svc.http_api.embeddings.models import EmbeddingsBody, EmbeddingsUsage, InputsBody
from gateway_svc.http_api.openai import unsupported_fields


class ClassifyBody(InputsBody):
    """A body of /classify."""

    elsewhere: ClassVar = (EmbeddingsBody,)
    unserved: ClassVar[Neutral] = unsupported_fields.CLASSIFY
    without_effect: ClassVar[Notes] = {"service_tier": "How to bill."}

    use_activation: bool | None = option("Whether the activation function of the model's head is applied.", True)
    raw_scores: bool | None = option("The opposite of use_activation.", False)


class ClassifiedInput(AnswerModel):
    """The numbers of one input."""

    index: int = Field(description="Which input, from 0.")
    label: str = Field(description="The label with the highest number; of equal ones, the first.")
    probs: list[float] = Field(
        description="A number for each label, by the order of the model's config.json: probabilities, if the "
        "activation function of its head makes them."
    )
    num_classes: int = Field(description="How many labels there are.")


class ClassifyAnswer(AnswerModel):
    """The numbers of all inputs, in their order."""

    id: str
    object: Literal["list"]
    created: int = Field(description="In seconds since 1970.")
    model: str
    data: list[ClassifiedInput]
    usage: EmbeddingsUsage
