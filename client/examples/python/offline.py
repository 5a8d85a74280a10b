"""Models in this process, without a server: python offline.py [MODEL [EMBEDDING_MODEL]].

Needs `pip install --editable '.[local]'` in a clone of Quire.
"""

import sys

from quire import LLM, SamplingParams

PROMPTS = ["A quire is", "Paper is made of", "The first printed book was"]


def generate(model: str | None) -> None:
    """Continues three prompts, then answers a chat."""
    with LLM(model) as llm:
        for output in llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=16)):
            print(f"{output.prompt!r}: {output.outputs[0].text!r}")
        messages = [{"role": "user", "content": "What is a quire?"}]
        (answer,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=32))
        print(f"answer: {answer.outputs[0].text!r}")


def compare(model: str) -> None:
    """Embeds three texts, then compares one with the others. The model is one such as all-MiniLM-L6-v2."""
    with LLM(model) as llm:
        for prompt, output in zip(PROMPTS, llm.embed(PROMPTS), strict=True):
            print(f"{prompt!r}: {output.outputs.hidden_size} numbers")
        for prompt, score in zip(PROMPTS[1:], llm.score(PROMPTS[0], PROMPTS[1:]), strict=True):
            print(f"{PROMPTS[0]!r} and {prompt!r}: {score.outputs.score:.2f}")


def main() -> None:
    """Runs both, each with its model."""
    model, embedding_model = (*sys.argv[1:], None, None)[:2]
    generate(model)
    if embedding_model is not None:
        compare(embedding_model)


if __name__ == "__main__":
    main()
