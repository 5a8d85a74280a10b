"""Pairs of texts as chats: prompts, what is cut of them, and models whose template writes none."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Encoding

from gateway_svc.chat_encoder import ChatEncoder
from gateway_svc.chat_template import ChatTemplateError
from gateway_svc.model_catalog import CatalogModel
from gateway_svc.pair_chats import PairChats, pair_form
from gateway_svc.score_validation import validate_scores
from gateway_svc.scores import UnvalidatedScores
from gateway_svc.text_pairs import PairForm, PairTemplate, PairText
from gateway_svc.tokenizer import InvalidModelFiles, ModelTokenizer, TextToEncode
from gateway_svc.validated_request import ModelInfo, TruncationSide
from gateway_svc.validated_value import ValidatedValue
from quire.inference.v1 import inference_pb2 as api
from reranker_files import TEMPLATE, write_reranker_files
from svc_common.errors import QuireError
from svc_common.model_settings import ModelSettings
from svc_common.models import DamagedModelFile
from tiny_model import CHAT_TEMPLATE, make_model_directory, tiny_tokenizer

LEFT, RIGHT = TruncationSide.LEFT, TruncationSide.RIGHT


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    make_model_directory(tmp_path)
    write_reranker_files(tmp_path, 5, 6)
    return tmp_path


def load(directory: Path) -> tuple[ModelTokenizer, PairForm]:
    tokenizer = ModelTokenizer.load(directory)
    return tokenizer, pair_form(tokenizer, directory)


async def text_of(tokenizer: ModelTokenizer, text: str, limit: int | None = None) -> PairText:
    (token_ids,) = [ids async for ids in tokenizer.encode_texts([TextToEncode(text, of_chat=True)])]
    return PairText.of(text, token_ids, limit, None, RIGHT)


async def requests_of(call: UnvalidatedScores, tokenizer: ModelTokenizer, form: PairForm) -> Sequence[ValidatedValue]:
    model = ModelInfo("reranker", 200, 300)
    fields: dict[str, Any] = {"request_id": "own-id", "retention": None, "tenant": "default"}
    return (await validate_scores(call, tokenizer, model, form, (), **fields)).requests


async def prompt_of(
    directory: Path, query: str, document: str, num_kept: int | None = None, side: TruncationSide = RIGHT
) -> str:
    """The prompt as text, special tokens too."""
    tokenizer, form = load(directory)
    first, second = await text_of(tokenizer, query), await text_of(tokenizer, document)
    pair = await form.join(first, second, num_kept, side, "default")
    assert pair.num_first_tokens == len(pair.token_ids)
    assert num_kept is None or len(pair.token_ids) <= num_kept
    return tiny_tokenizer().decode(pair.token_ids, skip_special_tokens=False)


async def test_the_template_writes_both_texts(directory: Path) -> None:
    expected = "<|im_start|>Query: who?\nDocument: me.<|im_end|>Answer:"
    assert await prompt_of(directory, "who?", "me.") == expected


async def test_the_files_name_the_instruction_and_variables(directory: Path) -> None:
    prompts = {"prompts": {"web": "Search."}, "default_prompt_name": "web"}
    write_reranker_files(directory, 5, 6, prompts=prompts, variables={"tail": " now", "add_generation_prompt": True})
    expected = "Task: Search.\n<|im_start|>Query: who?\nDocument: me.<|im_end|>Answer: now"
    assert await prompt_of(directory, "who?", "me.") == expected
    write_reranker_files(directory, 5, 6, variables={"add_generation_prompt": False})
    assert await prompt_of(directory, "who?", "me.") == expected[len("Task: Search.\n") : -len("Answer: now")]


async def test_a_call_may_have_an_instruction(directory: Path) -> None:
    prompts = {"prompts": {"web": "Search."}, "default_prompt_name": "web"}
    write_reranker_files(directory, 5, 6, prompts=prompts)
    tokenizer, form = load(directory)

    async def prompts_of(**fields: Any) -> list[str]:
        call = UnvalidatedScores.from_proto(api.ScoreRequest(queries=["who?"], documents=["me.", "you"], **fields))
        requests = await requests_of(call, tokenizer, form)
        return [tiny_tokenizer().decode(one.prompt_token_ids, skip_special_tokens=False) for one in requests]

    pair = "<|im_start|>Query: who?\nDocument: {}<|im_end|>Answer:"
    texts = [pair.format("me."), pair.format("you")]
    assert await prompts_of(instruction="Find people.") == [f"Task: Find people.\n{text}" for text in texts]
    assert await prompts_of() == [f"Task: Search.\n{text}" for text in texts]
    # It is no part of what is cut.
    changed = await form.with_instruction("Find people.", "default")
    assert changed is not None
    kept = changed.num_special + 4
    (first, _) = await prompts_of(instruction="Find people.", truncate_prompt_tokens=kept)
    assert first == "Task: Find people.\n<|im_start|>Query: wh\nDocument: me<|im_end|>Answer:"


async def test_a_template_may_have_the_instruction_as_a_variable(directory: Path) -> None:
    """As vLLM gives it, in place of one that the files name."""
    template = "{{ instruction }}: {{ messages[-2].content }}/{{ messages[-1].content }}"
    write_reranker_files(directory, 5, 6, template=template, variables={"instruction": "Search"})
    tokenizer, form = load(directory)
    changed = await form.with_instruction("Find", "default")
    assert changed is not None
    text = await text_of(tokenizer, "a")
    for one, expected in ((form, "Search: a/a"), (changed, "Find: a/a")):
        pair = await one.join(text, text, None, RIGHT, "default")
        assert tiny_tokenizer().decode(pair.token_ids) == expected


async def test_control_tokens_of_an_instruction_are_text(directory: Path) -> None:
    tokenizer, form = load(directory)
    changed = await form.with_instruction("<|im_end|>", "default")
    assert changed is not None
    text = await text_of(tokenizer, "a")
    token_ids = (await changed.join(text, text, None, RIGHT, "default")).token_ids
    special = [tiny_tokenizer().token_to_id(token) for token in ("<|im_start|>", "<|im_end|>")]
    assert [token for token in token_ids if token in special] == special


@pytest.mark.parametrize(
    ("instruction", "template", "text"),
    [
        ("", TEMPLATE, "must not be empty"),
        ("x" * 300, TEMPLATE, "leaves no room for texts: a pair has at least 3[0-9]{2} tokens, and the context 200"),
        ("x" * 200_000, TEMPLATE, "is longer than 16 contexts"),
        ("\ud800", TEMPLATE, "is not valid Unicode"),
        (
            "x",
            "{{ messages[-2].content }}|{{ messages[-1].content }}",
            "is for models whose chat template writes",
        ),
        ("no", TEMPLATE + "{{ raise_exception('no') if messages[0].content == 'no' }}", "rejects it"),
    ],
    ids=["empty", "too long", "far too long", "half a character", "not written", "rejected"],
)
async def test_an_instruction_that_cannot_be_used_is_named(
    instruction: str, template: str, text: str, directory: Path
) -> None:
    write_reranker_files(directory, 5, 6, template=template)
    tokenizer, form = load(directory)
    plain = UnvalidatedScores.from_proto(api.ScoreRequest(queries=["a"], documents=["b"]))
    with pytest.raises(QuireError, match=text) as raised:
        await requests_of(replace(plain, instruction=instruction), tokenizer, form)
    assert raised.value.field == "instruction"


async def test_a_template_may_take_parts(directory: Path) -> None:
    template = TEMPLATE.replace("message.content", "message.content[0].text")
    write_reranker_files(directory, 5, 6, template=template, has_parts=True)
    assert await prompt_of(directory, "who?", "me.") == "<|im_start|>Query: who?\nDocument: me.<|im_end|>Answer:"
    # Which of both it takes is found where the files do not say it.
    write_reranker_files(directory, 5, 6, template=template)
    assert await prompt_of(directory, "who?", "me.") == "<|im_start|>Query: who?\nDocument: me.<|im_end|>Answer:"


async def test_control_tokens_of_texts_are_text(directory: Path) -> None:
    tokenizer, form = load(directory)
    first, second = await text_of(tokenizer, "<|im_end|>"), await text_of(tokenizer, "a<|im_start|>")
    token_ids = (await form.join(first, second, None, RIGHT, "default")).token_ids
    special = [tiny_tokenizer().token_to_id(token) for token in ("<|im_start|>", "<|im_end|>")]
    assert [token for token in token_ids if token in special] == special


@pytest.mark.parametrize(
    ("side", "expected"),
    [(RIGHT, "Query: abcdef\nDocument: 012345<"), (LEFT, "Query: abcdef\nDocument: 456789<")],
)
async def test_the_longer_text_is_cut_first(side: TruncationSide, expected: str, directory: Path) -> None:
    _, form = load(directory)
    assert expected in await prompt_of(directory, "abcdef", "0123456789", form.num_special + 12, side)
    shortest = await prompt_of(directory, "abcdef", "0123456789", form.num_special + 2, side)
    assert shortest.count("Query: ") == shortest.count("<|im_end|>Answer:") == 1


async def test_a_text_has_a_limit_of_its_own(directory: Path) -> None:
    tokenizer, form = load(directory)
    pair = await form.join(await text_of(tokenizer, "abc", 2), await text_of(tokenizer, "0123", 3), None, RIGHT, "x")
    assert "Query: ab\nDocument: 012<" in tiny_tokenizer().decode(pair.token_ids, skip_special_tokens=False)


async def test_limits_count_control_tokens_of_texts_as_text(directory: Path) -> None:
    tokenizer, form = load(directory)
    call = UnvalidatedScores.from_proto(
        api.ScoreRequest(queries=["a"], documents=["<|im_end|>" * 200], max_tokens_per_document=9)
    )
    (request,) = await requests_of(call, tokenizer, form)
    assert len(request.prompt_token_ids) <= form.num_special + 1 + 9
    cut = UnvalidatedScores.from_proto(
        api.ScoreRequest(queries=["a"], documents=["<|im_end|>" * 200], truncate_prompt_tokens=form.num_special + 20)
    )
    (request,) = await requests_of(cut, tokenizer, form)
    assert form.num_special + 15 <= len(request.prompt_token_ids) <= form.num_special + 20


async def test_a_long_text_is_cut_once_for_all_its_pairs(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, form = load(directory)
    lengths: list[int] = []
    encode_text = ChatEncoder.encode_text

    def counted(encoder: ChatEncoder, text: str) -> Encoding:
        lengths.append(len(text))
        return encode_text(encoder, text)

    monkeypatch.setattr(ChatEncoder, "encode_text", counted)
    documents = [f"{number:04}" for number in range(50)]
    call = UnvalidatedScores.from_proto(
        api.ScoreRequest(queries=["0" * 2_000], documents=documents, truncate_prompt_tokens=-1)
    )
    assert len(await requests_of(call, tokenizer, form)) == 50
    assert sum(length > 200 for length in lengths) == 2  # to count its tokens, and to cut it


async def test_characters_of_several_tokens_stay_whole(directory: Path) -> None:
    _, form = load(directory)
    for num_kept in range(form.num_special + 3, form.num_special + 14):
        prompt = await prompt_of(directory, "a", "\N{SNOWMAN}" * 6, num_kept)
        assert "\N{REPLACEMENT CHARACTER}" not in prompt


@pytest.mark.parametrize("template", ["{{ raise_exception('none') }}", "{{ messages[0].content }}"])
def test_answers_need_a_template_that_writes_pairs(template: str, directory: Path) -> None:
    write_reranker_files(directory, 5, 6, template=template)
    with pytest.raises(InvalidModelFiles, match="QUIRE_CHAT_TEMPLATE"):
        load(directory)


def test_which_models_take_chats(directory: Path) -> None:
    """Those that answer, those whose files or whose template say so; a template for chats may write any role."""
    transformer = directory / "sentence_bert_config.json"

    def form(template: str, *files: str) -> type:
        (directory / "chat_template.jinja").write_text(template)
        for name in ("modules.json", "sentence_bert_config.json"):
            if name not in files:
                (directory / name).unlink(missing_ok=True)
        return type(load(directory)[1])

    assert form(CHAT_TEMPLATE, "modules.json", "sentence_bert_config.json") is PairChats
    assert form(CHAT_TEMPLATE, "sentence_bert_config.json") is PairChats
    transformer.write_text('{"max_seq_length": 8}')
    assert form(CHAT_TEMPLATE, "sentence_bert_config.json") is PairTemplate
    assert form(TEMPLATE) is PairChats
    assert form(CHAT_TEMPLATE) is PairTemplate


def test_a_classifier_of_messages_needs_such_a_template_too(directory: Path) -> None:
    (directory / "modules.json").unlink()
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(InvalidModelFiles, match="QUIRE_CHAT_TEMPLATE"):
        load(directory)


def test_the_template_may_end_a_prompt_in_place_of_the_tokenizer(directory: Path) -> None:
    """A tokenizer that should add an end-of-text token and does not is refused of other models."""
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"add_eos_token": True}))
    assert CatalogModel.load(ModelSettings(model=str(directory))).pairs is not None
    (directory / "modules.json").write_text('[{"type": "sentence_transformers.models.Pooling", "path": ""}]')
    with pytest.raises(InvalidModelFiles, match="add_eos_token"):
        CatalogModel.load(ModelSettings(model=str(directory)))


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("sentence_bert_config.json", "[]"),
        ("sentence_bert_config.json", '{"modality_config": 3}'),
        ("sentence_bert_config.json", '{"processing_kwargs": {"chat_template": 3}}'),
        ("config_sentence_transformers.json", '{"default_prompt_name": "x"}'),
        ("config_sentence_transformers.json", '{"default_prompt_name": "x", "prompts": {"x": 3}}'),
        ("config_sentence_transformers.json", "{"),
    ],
)
def test_files_of_another_form_are_refused(file: str, text: str, directory: Path) -> None:
    (directory / file).write_text(text)
    with pytest.raises((InvalidModelFiles, DamagedModelFile), match=file):
        load(directory)


async def test_a_pair_that_the_template_rejects_is_named(directory: Path) -> None:
    rejecting = TEMPLATE + "{% if 'no' in messages[-1].content %}{{ raise_exception('no') }}{% endif %}"
    write_reranker_files(directory, 5, 6, template=rejecting)
    tokenizer, form = load(directory)
    call = UnvalidatedScores.from_proto(api.ScoreRequest(queries=["a"], documents=["b", "no"]))
    with pytest.raises(QuireError) as raised:
        await requests_of(call, tokenizer, form)
    assert raised.value.field == "documents[1]"
    with pytest.raises(ChatTemplateError):
        await form.join(await text_of(tokenizer, "a"), await text_of(tokenizer, "no"), None, RIGHT, "default")
