"""The models of a gateway: lookup by name and alias, and loading by their settings."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
from tokenizers import processors

from encoder_model import encoder_tokenizer, make_encoder_directory
from gateway_svc.chats import ChatMessage, ChatPrompt
from gateway_svc.field_checker import FieldChecker
from gateway_svc.field_paths import contract_field_path
from gateway_svc.model_catalog import ModelCatalog
from gateway_svc.settings import BadSetting
from gateway_svc.tenant import Tenant
from gateway_svc.tokenizer import InvalidModelFiles
from svc_common.errors import QuireError, Reason
from svc_common.model_settings import ModelSettings, read_models_file
from svc_common.model_tasks import ModelTask
from svc_common.models import ModelNotFound, tokenizer_fingerprint
from tiny_model import make_model_directory


@pytest.fixture
def several(model_directory: Path, tmp_path: Path) -> Path:
    """A file of two models."""
    make_model_directory(tmp_path / "second")
    path = tmp_path / "models.toml"
    path.write_text(
        f"""
        [[models]]
        model = "{model_directory}"
        served_model_name = "first, one"
        [[models]]
        model = "second"
        override_generation_config = {{ top_k = 3 }}
        """
    )
    return path


def test_models_are_found_by_name_and_alias(several: Path) -> None:
    catalog = ModelCatalog.load(read_models_file(several))
    first, second = catalog
    assert (first.names, second.names) == (("first", "one"), ("second",))
    found = [catalog.find(name, contract_field_path) for name in (None, "first", "one", "second")]
    assert found == [first, first, first, second]
    assert (catalog.get("one"), catalog.get("gone")) == (first, None)
    assert catalog.fingerprints == {
        name: tokenizer_fingerprint(several.parent / "second") for name in ("first", "second")
    }
    assert (first.given_defaults, second.given_defaults) == ({}, {"top_k": 3})
    catalog.close()


def test_a_task_is_known_by_the_configuration(model_directory: Path, tmp_path: Path) -> None:
    encoder = make_encoder_directory(tmp_path / "encoder")
    cross_encoder = make_encoder_directory(tmp_path / "cross-encoder", labels=["LABEL_0"])
    classifier = make_encoder_directory(tmp_path / "classifier", labels=["NEGATIVE", "POSITIVE"])
    directories = model_directory, encoder, cross_encoder, classifier
    settings = [ModelSettings(model=str(one), served_names=(one.name,)) for one in directories]
    models = list(ModelCatalog.load(settings))
    assert [model.task for model in models] == list(ModelTask)
    assert [model.labels for model in models] == [(), (), ("LABEL_0",), ("NEGATIVE", "POSITIVE")]


def test_texts_of_an_embedding_model_end_as_its_tokenizer_config_says(tmp_path: Path) -> None:
    directory = make_encoder_directory(tmp_path)
    for config, is_valid in (
        ({"add_eos_token": True, "eos_token": "[SEP]"}, True),
        ({"add_eos_token": True, "eos_token": {"content": "[SEP]"}}, True),
        ({"add_eos_token": False, "eos_token": "[MASK]"}, True),
        ({"add_eos_token": True, "eos_token": {"content": "[MASK]"}}, False),
    ):
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
        with nullcontext() if is_valid else pytest.raises(InvalidModelFiles, match=r"add_eos_token.*\[MASK\]"):
            ModelCatalog.load([ModelSettings(model=str(directory))])


def test_a_cross_encoder_has_two_types_of_tokens(tmp_path: Path) -> None:
    tokenizer = encoder_tokenizer(processors.TemplateProcessing(single="$A", pair="$B:1 $A:0", special_tokens=[]))
    directory = make_encoder_directory(tmp_path, tokenizer, ["LABEL_0"])
    with pytest.raises(InvalidModelFiles, match="other types"):
        ModelCatalog.load([ModelSettings(model=str(directory))])


def test_a_key_sees_the_models_that_it_may_use(several: Path) -> None:
    catalog = ModelCatalog.load(read_models_file(several))
    first, second = catalog
    of_alias, of_second = Tenant("a", models=frozenset({"one", "gone"})), Tenant("b", models=frozenset({"second"}))
    assert [catalog.find(name, contract_field_path, of_alias) for name in (None, "first", "one")] == [first] * 3
    assert [catalog.find(name, contract_field_path, of_second) for name in (None, "second")] == [second] * 2
    for name, tenant, there in (("first", of_second, "second"), (None, Tenant("c", models=frozenset({"x"})), "none")):
        with pytest.raises(QuireError, match=f"there is {there}$") as raised:
            catalog.find(name, contract_field_path, tenant)
        assert raised.value.reason is Reason.MODEL_NOT_FOUND
    catalog.close()


async def test_a_model_takes_the_roles_that_its_settings_add(model_directory: Path) -> None:
    ipython = ChatPrompt([ChatMessage("ipython", "a", path="chat.messages[0]")])
    for roles, is_taken in (((), False), (("ipython", "critic"), True)):
        catalog = ModelCatalog.load([ModelSettings(str(model_directory), chat_roles=roles)])
        (model,) = catalog
        check = FieldChecker(contract_field_path)
        for role in ("system", "developer", "user", "assistant"):
            assert await model.validator.encode(ChatPrompt([ChatMessage(role, "a")]), check)
        if is_taken:
            assert await model.validator.encode(ipython, check)
        else:
            with pytest.raises(QuireError, match="must be system, developer, user, assistant or tool") as raised:
                await model.validator.encode(ipython, check)
            assert raised.value.field == "chat.messages[0].role"
        catalog.close()


def test_a_model_that_is_not_there_is_refused_with_those_that_are(several: Path) -> None:
    catalog = ModelCatalog.load(read_models_file(several))
    for name in ("gone", "", "First"):
        with pytest.raises(QuireError, match="there is first, second") as raised:
            catalog.find(name, contract_field_path)
        assert (raised.value.reason, raised.value.field) == (Reason.MODEL_NOT_FOUND, "model")
    catalog.close()


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ('chat_template = "{% if %}"', BadSetting, "QUIRE_CHAT_TEMPLATE does not parse"),
        (
            f"chat_template = '{'{% for a in b %}' * 25}{'{% endfor %}' * 25}'",
            BadSetting,
            "QUIRE_CHAT_TEMPLATE cannot be used as a Jinja template: it cannot be compiled: too many",
        ),
        ('chat_template = "gone.jinja"', BadSetting, "QUIRE_CHAT_TEMPLATE: "),
        ('tool_format = "x"', BadSetting, "QUIRE_TOOL_FORMAT: x is not one of auto, none, glm45, "),
        (
            'reasoning_format = "x"',
            BadSetting,
            "QUIRE_REASONING_FORMAT: x is not one of auto, none, hunyuan_a13b, granite, think, ",
        ),
        ('generation_config = "gone"', BadSetting, "QUIRE_GENERATION_CONFIG is "),
        ("override_generation_config = { top_p = 2 }", BadSetting, "QUIRE_OVERRIDE_GENERATION_CONFIG: top_p must be"),
        (
            'tool_format = "harmony"\nreasoning_format = "think"',
            BadSetting,
            "QUIRE_TOOL_FORMAT is harmony and QUIRE_REASONING_FORMAT think: ",
        ),
        (
            'tool_format = "hermes"\nreasoning_format = "harmony"',
            BadSetting,
            "QUIRE_TOOL_FORMAT is hermes and QUIRE_REASONING_FORMAT harmony: ",
        ),
        ('tokenizer = "./gone"', ModelNotFound, "QUIRE_TOKENIZER: "),
    ],
)
def test_the_error_of_a_model_names_its_entry(text: str, kind: type[Exception], message: str, several: Path) -> None:
    several.write_text(f'[[models]]\nmodel = "second"\n[[models]]\nmodel = "second"\nserved_model_name = "a"\n{text}')
    with pytest.raises(kind) as raised:
        ModelCatalog.load(read_models_file(several))
    assert str(raised.value).startswith(f"{several}: models[1]: {message}")


def test_the_error_of_broken_files_names_their_entry(several: Path) -> None:
    (several.parent / "second" / "tokenizer.json").write_text("{")
    with pytest.raises(InvalidModelFiles, match=r"models\[1\]: .*second"):
        ModelCatalog.load(read_models_file(several))


def test_settings_of_one_model_need_no_place(model_directory: Path) -> None:
    with pytest.raises(BadSetting, match=r"^QUIRE_CHAT_TEMPLATE"):
        ModelCatalog.load([ModelSettings(str(model_directory), chat_template="{% if %}")])
