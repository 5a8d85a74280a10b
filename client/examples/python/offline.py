"""A model in this process, without a server: python offline.py [MODEL]. Needs `pip install 'quire[local]'`."""

import sys

from quire import LLM, SamplingParams

PROMPTS = ["A quire is", "Paper is made of", "The first printed book was"]


def main() -> None:
    """Continues three prompts, then answers a chat."""
    with LLM(sys.argv[1] if len(sys.argv) > 1 else None) as llm:
        for output in llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=16)):
            print(f"{output.prompt!r}: {output.outputs[0].text!r}")
        messages = [{"role": "user", "content": "What is a quire?"}]
        (answer,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=32))
        print(f"answer: {answer.outputs[0].text!r}")


if __name__ == "__main__":
    main()
