"""T(k): the text that is sent after k tokens."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from gateway_svc.detokenizer import Detokenizer, SequenceText
from gateway_svc.validated_request import SpecialTokens, StopText
from gateway_svc.vocabulary import Vocabulary
from gateway_values import KINDS, id_of, make_rendering, sentencepiece_tokenizer, vocabulary_of

TOKENIZERS = {kind: make() for kind, make in KINDS.items()}
VOCABULARIES = {kind: vocabulary_of(tokenizer) for kind, tokenizer in TOKENIZERS.items()}
TINY, TINY_VOCABULARY = TOKENIZERS["byte level"], VOCABULARIES["byte level"]

# Bytes that form complete and incomplete characters of two, three and four bytes, and a few letters.
FRAGMENTS = [
    *TINY.encode("aß你😀").ids,
    id_of(TINY, "hello"),
    id_of(TINY, "łå"),
    2,
]


def detokenizer_of(vocabulary: Vocabulary, prompt: list[int], special: SpecialTokens) -> Detokenizer:
    rendering = make_rendering(vocabulary, prompt_token_ids=prompt, special_tokens=special)
    return Detokenizer(vocabulary, rendering.prompt_tail, vocabulary.hidden_ids(special))


def text_of(vocabulary_kind: str, prompt: list[int], output: list[int], special: SpecialTokens) -> str:
    detokenizer = detokenizer_of(VOCABULARIES[vocabulary_kind], prompt, special)
    return "".join(map(detokenizer.push, output)) + detokenizer.flush()


def decoded(tokenizer: Tokenizer, token_ids: list[int], special: SpecialTokens) -> str:
    return tokenizer.decode(token_ids, skip_special_tokens=special is SpecialTokens.HIDDEN)


@pytest.mark.parametrize("special", [SpecialTokens.HIDDEN, SpecialTokens.KEPT])
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_text_is_what_the_tokenizer_adds_to_the_prompt(kind: str, special: SpecialTokens, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    # Byte tokens of sentencepiece have their own test: the decoder changes earlier text if they form no character.
    start = 259 if kind == "sentencepiece" else 0
    ids = st.one_of(st.integers(0, 2), st.integers(start, tokenizer.get_vocab_size() - 1))
    prompt = data.draw(st.lists(ids, max_size=6).filter(lambda ids: "\ufffd" not in decoded(tokenizer, ids, special)))
    output = data.draw(st.lists(ids, max_size=20))
    before = decoded(tokenizer, prompt, special)
    whole = decoded(tokenizer, prompt + output, special)
    assert text_of(kind, prompt, output, special) == whole[len(before) :]


@given(st.lists(st.sampled_from(FRAGMENTS), max_size=30))
def test_broken_characters_read_as_the_tokenizer_reads_them(output: list[int]) -> None:
    for special in (SpecialTokens.HIDDEN, SpecialTokens.KEPT):
        assert text_of("byte level", [], output, special) == decoded(TINY, output, special)


def test_characters_of_sentencepiece_come_whole_from_their_bytes() -> None:
    tokenizer = sentencepiece_tokenizer()
    output = [id_of(tokenizer, f"<0x{byte:02X}>") for byte in "你😀".encode()]
    detokenizer = detokenizer_of(vocabulary_of(tokenizer), [], SpecialTokens.HIDDEN)
    assert [detokenizer.push(token_id) for token_id in output] == ["", "", "你", "", "", "", "😀"]


@pytest.mark.parametrize(("prompt", "text"), [(["a"], " a"), (["<s>"], "a"), ([], "a"), (["a", "</s>"], " a")])
def test_the_first_word_keeps_its_space_after_a_visible_prompt(prompt: list[str], text: str) -> None:
    tokenizer = sentencepiece_tokenizer()
    token_ids = [id_of(tokenizer, token) for token in prompt]
    detokenizer = detokenizer_of(vocabulary_of(tokenizer), token_ids, SpecialTokens.HIDDEN)
    assert detokenizer.push(id_of(tokenizer, "▁a")) == text


def test_a_character_that_the_prompt_began_is_completed() -> None:
    first, *rest = TINY.encode("😀").ids
    detokenizer = detokenizer_of(TINY_VOCABULARY, [first], SpecialTokens.HIDDEN)
    assert "".join(map(detokenizer.push, rest)) == "😀"


@pytest.mark.parametrize("output", ["", "a", "a😀", "😀"])
def test_a_part_of_a_character_that_stays_one_is_text_of_the_prompt_alone(output: str) -> None:
    prompt = TINY.encode("a😀").ids[:-1]
    assert text_of("byte level", prompt, TINY.encode(output).ids, SpecialTokens.HIDDEN) == output


def test_tokens_that_end_within_a_character_end_in_a_replacement() -> None:
    assert text_of("byte level", [], TINY.encode("a😀").ids[:-1], SpecialTokens.HIDDEN) == "a\ufffd"


def sequence_text(*stop: str, min_tokens: int = 0, stop_text: StopText = StopText.EXCLUDED) -> SequenceText:
    return SequenceText(
        TINY_VOCABULARY, make_rendering(TINY_VOCABULARY, stop=stop, min_tokens=min_tokens, stop_text=stop_text)
    )


def pushed(text: SequenceText, output: str) -> list[str]:
    """The text that is sent with each token, up to a stop string."""
    due = []
    for token_id in TINY.encode(output).ids:
        due.append(text.push(token_id))
        if text.matched is not None:
            break
    return due


def test_the_beginning_of_a_stop_string_is_held_back() -> None:
    assert pushed(sequence_text("bcd"), "abcx") == ["a", "", "", "bcx"]


def test_text_that_is_held_back_is_flushed_at_the_end() -> None:
    text = sequence_text("bcd")
    assert pushed(text, "abc") == ["a", "", ""]
    assert text.flush() == "bc"


def test_text_ends_before_the_stop_string() -> None:
    text = sequence_text("lo w")
    assert "".join(pushed(text, "hello world")) == "hel"
    assert (text.matched, text.num_tokens, text.flush()) == ("lo w", 2, "")


def test_text_ends_with_the_stop_string_if_requested() -> None:
    assert "".join(pushed(sequence_text("lo w", stop_text=StopText.INCLUDED), "hello world")) == "hello w"


def test_a_stop_string_counts_only_in_tokens_after_min_tokens() -> None:
    text = sequence_text("a", min_tokens=2)
    assert pushed(text, "aabac") == ["a", "a", "b", ""]
    assert text.num_tokens == 4


def test_a_stop_string_may_begin_within_min_tokens() -> None:
    text = sequence_text("abc", min_tokens=2)
    assert pushed(text, "abc") == ["", "", ""]
    assert text.matched == "abc"


def test_a_stop_string_may_end_in_a_character_of_several_tokens() -> None:
    text = sequence_text("好")
    assert "".join(pushed(text, "你好你")) == "你"
    assert text.matched == "好"


@given(
    output=st.lists(st.sampled_from(FRAGMENTS), max_size=25),
    stop=st.lists(st.text("aß你😀helo\ufffd", min_size=1, max_size=4), max_size=3, unique=True).map(tuple),
    min_tokens=st.integers(0, 5),
    match_stop=st.integers(0, 25),
)
@example(output=TINY.encode("hello").ids, stop=("llo", "e"), min_tokens=0, match_stop=0)
def test_text_after_k_tokens_depends_on_those_tokens_alone(
    output: list[int], stop: tuple[str, ...], min_tokens: int, match_stop: int
) -> None:
    def after(num_tokens: int) -> tuple[str, str | None]:
        text = SequenceText(TINY_VOCABULARY, make_rendering(TINY_VOCABULARY, stop=stop, min_tokens=min_tokens))
        due = ""
        for token_id in output[:num_tokens]:
            due += text.push(token_id)
            if text.matched is not None:
                break
        return due, text.matched

    early, early_match = after(match_stop)
    whole, match = after(len(output))
    assert whole.startswith(early)
    if early_match is not None:
        assert (early, early_match) == (whole, match)
    for one in stop:
        assert min_tokens or one not in whole, "no stop string is ever given out"


@pytest.mark.parametrize("kind", KINDS)
def test_joined_special_tokens_have_no_space_between_them(kind: str) -> None:
    tokenizer, vocabulary = TOKENIZERS[kind], VOCABULARIES[kind]
    special = min(vocabulary.special_ids)
    (letter,) = tokenizer.encode("a", add_special_tokens=False).ids
    rendering = make_rendering(vocabulary, prompt_token_ids=[letter], special_tokens=SpecialTokens.JOINED)
    text = SequenceText(vocabulary, rendering)
    literal = vocabulary.added_texts[special]
    alone = text.push(special)
    assert alone == vocabulary.piece(special).decode()
    assert [text.push(special), text.push(special)] == [literal, literal]
    assert text.push(letter) == vocabulary.piece(letter).decode()
    assert text.push(special) == alone
    if kind == "wordpiece":
        assert alone == f" {literal}"
