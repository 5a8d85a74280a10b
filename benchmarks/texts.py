"""Generated English: prompts that no model and no cache has seen."""

import random

from tokenizers import Tokenizer

_PEOPLE = (
    "the harbour master", "a retired surveyor", "my sister", "the night librarian", "an apprentice baker",
    "the ferry captain", "a careful accountant", "the village doctor", "our old teacher", "the bridge keeper",
    "a travelling musician", "the head gardener", "the junior engineer", "a patient beekeeper", "the court clerk",
)  # fmt: skip
_VERBS = (
    "repaired", "measured", "described", "painted", "borrowed", "counted", "carried", "sold", "forgot", "found",
    "examined", "drew", "rebuilt", "praised", "copied", "cleaned", "hid", "photographed", "weighed", "returned",
)  # fmt: skip
_ADJECTIVES = (
    "broken", "silver", "heavy", "nearly finished", "forgotten", "narrow", "blue", "borrowed", "ancient", "noisy",
    "carefully folded", "wooden", "unsigned", "small", "leaking", "famous", "crooked", "warm", "unusual", "expensive",
)  # fmt: skip
_THINGS = (
    "lantern", "ledger", "staircase", "clock", "map of the valley", "telescope", "letter", "boat", "violin", "kettle",
    "printing press", "greenhouse", "bicycle", "stone wall", "photograph", "recipe", "orchard", "weather station",
    "bell tower", "dictionary", "window", "compass", "garden gate", "water mill", "set of keys",
)  # fmt: skip
_TIMES = (
    "in early spring", "after the storm", "on a quiet Sunday", "before the market opened", "during the long winter",
    "at half past six", "twice a week", "in 1923", "when the river froze", "on the last day of the fair",
    "between two trains", "long before breakfast", "while the others slept", "for the third time that year",
)  # fmt: skip
_REASONS = (
    "because the rain had not stopped", "although nobody had asked", "so that the children could see it",
    "since the price had fallen to {n} crowns", "even though it weighed {n} pounds", "as the council had decided",
    "because only {n} of them were left", "while the whole street watched", "and wrote down every detail",
    "without telling anyone", "and was paid {n} coins for it", "in spite of the noise from the quarry",
)  # fmt: skip
_OPENINGS = (
    "Read this account and say what happens next.", "Here are notes from an old diary.", "Continue the story.",
    "Summarize the following report.", "The following was found in an archive.", "Explain what went wrong here.",
    "Rewrite this for a newspaper.", "List everyone who is named below.", "A chronicle of our town, volume {n}.",
)  # fmt: skip


def write_text(rng: random.Random, number: int, num_words: int) -> str:
    """Sentences of at least `num_words` words in all, behind a number of three digits that makes texts distinct."""
    sentences = [f"No. {number}. {rng.choice(_OPENINGS)}"]
    while sum(len(sentence.split()) for sentence in sentences) < num_words:
        parts = [
            rng.choice(_PEOPLE),
            rng.choice(_VERBS),
            rng.choice(("the", "a certain", "our", "that", "his neighbour's")),
            rng.choice(_ADJECTIVES),
            rng.choice(_THINGS),
            rng.choice(_TIMES),
        ]
        if rng.random() < 0.6:
            parts.append(rng.choice(_REASONS))
        sentence = " ".join(parts)
        sentences.append(f"{sentence[0].upper()}{sentence[1:]}{rng.choice('...!')}")
    return " ".join(sentences).replace("{n}", str(rng.randint(2, 400)))


def write_tokens(rng: random.Random, tokenizer: Tokenizer, number: int, num_tokens: int) -> list[int]:
    """Token ids of a text that is tokenized into exactly that many."""
    while True:
        text = write_text(rng, number, num_tokens)
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids[:num_tokens]
        # A word that is cut may be tokenized differently.
        if tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False).ids == ids and len(ids) == num_tokens:
            return ids
