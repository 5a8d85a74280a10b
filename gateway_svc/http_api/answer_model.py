"""What the models of answers share. They are for the document of the HTTP API: answers themselves are plain objects."""

from pydantic import BaseModel, ConfigDict


class AnswerModel(BaseModel):
    """An object of an answer. A field with a default may be left out."""

    model_config = ConfigDict(extra="forbid")
