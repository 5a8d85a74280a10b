"""Settings of models by variables and by a file of several models. Errors name file, entry and key."""

import json
from pathlib import Path
from typing import Any

import pytest

from gateway_svc.settings import GatewaySettings
from svc_common.model_settings import InvalidModelsFile, ModelSettings, read_models_file
from svc_common.model_tasks import ModelTask, labels_of, task_of
from svc_common.models import DEFAULT_MODEL, ModelNotFound, split_names
from svc_common.settings import read_settings
from svc_common.supervisor.settings import SupervisorSettings
from worker_svc.settings import WorkerSettings


def _file(directory: Path, text: str) -> Path:
    path = directory / "models.toml"
    path.write_text(text)
    return path


def test_an_entry_without_keys_is_the_default_model(tmp_path: Path) -> None:
    path = _file(tmp_path, "[[models]]\n")
    (model,) = read_models_file(path)
    assert model == ModelSettings(origin=f"{path}: models[0]")
    assert (model.names, model.environment) == ((DEFAULT_MODEL,), {})


def test_every_key_is_the_setting_of_that_name(tmp_path: Path) -> None:
    path = _file(
        tmp_path,
        """
        [[models]]
        model = "owner/name"
        revision = "v1"
        tokenizer = "owner/other"
        tokenizer_revision = "v2"
        served_model_name = ["one", "two"]
        chat_template = "{{ messages[0].content }}"
        chat_template_kwargs = { enable_thinking = false, style = { tone = "short" } }
        chat_roles = ["ipython", "critic"]
        tool_format = "hermes"
        reasoning_format = "none"
        generation_config = "auto"
        override_generation_config = { temperature = 0.5, max_new_tokens = 4_000_000 }
        task = "embed"
        workers = 3
        [[models]]
        served_model_name = "three, four"
        chat_roles = "ipython, critic"
        """,
    )
    first, second = read_models_file(path)
    assert first == ModelSettings(
        model="owner/name",
        revision="v1",
        tokenizer="owner/other",
        tokenizer_revision="v2",
        served_names=("one", "two"),
        chat_template="{{ messages[0].content }}",
        chat_template_kwargs=first.chat_template_kwargs,
        chat_roles=("ipython", "critic"),
        tool_format="hermes",
        reasoning_format="none",
        generation_config="auto",
        override_generation_config=first.override_generation_config,
        task="embed",
        workers=3,
        origin=f"{path}: models[0]",
    )
    assert json.loads(first.override_generation_config or "") == {"temperature": 0.5, "max_new_tokens": 4_000_000}
    assert json.loads(first.chat_template_kwargs or "") == {"enable_thinking": False, "style": {"tone": "short"}}
    assert first.environment == {
        "QUIRE_MODEL": "owner/name",
        "QUIRE_REVISION": "v1",
        "QUIRE_TOKENIZER": "owner/other",
        "QUIRE_TOKENIZER_REVISION": "v2",
        "QUIRE_SERVED_MODEL_NAME": "one,two",
        "QUIRE_TASK": "embed",
    }
    assert (second.names, second.chat_roles) == (("three", "four"), ("ipython", "critic"))


def test_relative_paths_are_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there" / "tiny").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    text = """
    [[models]]
    model = "tiny"
    tokenizer = "./gone"
    chat_template = "chat.jinja"
    generation_config = "tiny"
    [[models]]
    model = "owner/name"
    tokenizer = "/models/other"
    chat_template = "/templates/chat.jinja"
    generation_config = "/models/other"
    [[models]]
    served_model_name = "gone"
    model = "gone.gguf"
    tokenizer = "~/other"
    """
    relative, absolute, gone = read_models_file(_file(tmp_path / "there", text))
    there = tmp_path / "there"
    assert relative.names == ("tiny",)
    assert (relative.model, relative.tokenizer) == (str(there / "tiny"), str(there / "gone"))
    assert (relative.chat_template, relative.generation_config) == (str(there / "chat.jinja"), str(there / "tiny"))
    assert (absolute.model, absolute.tokenizer) == ("owner/name", "/models/other")
    assert (gone.model, gone.tokenizer) == (str(there / "gone.gguf"), str(Path.home() / "other"))
    assert (absolute.chat_template, absolute.generation_config) == ("/templates/chat.jinja", "/models/other")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "there is no [[models]] table"),
        ("models = []", "there is no [[models]] table"),
        ("[[models]", "Expected"),
        ("[[model]]", "model is not a key that is known here"),
        ("[models]", "models: input should be a valid list, not {}"),
        ('[[models]]\n[[models]]\nchat_templat = "a"', "models[1].chat_templat is not a key that is known here"),
        ("[[models]]\nmodel = 3", "models[0].model: input should be a valid string, not 3"),
        ("[[models]]\nworkers = 0", "models[0].workers: input should be greater than or equal to 1, not 0"),
        ("[[models]]\nworkers = true", "models[0].workers: input should be a valid integer, not True"),
        ("[[models]]\nserved_model_name = 3", "models[0].served_model_name: must be a string or a list of strings"),
        ('[[models]]\nserved_model_name = "a b"', "models[0].served_model_name: 'a b' is not a name for a model"),
        ('[[models]]\nserved_model_name = ["a", ""]', "models[0].served_model_name: '' is not a name for a model"),
        ('[[models]]\nserved_model_name = ["a", "a"]', "models[0].served_model_name: a is a duplicate"),
        ("[[models]]\nchat_roles = 3", "models[0].chat_roles: must be a string or a list of strings"),
        ('[[models]]\nchat_roles = "a b"', "models[0].chat_roles: 'a b' is not a role: 1 to 64 letters"),
        ('[[models]]\nchat_roles = ["a", ""]', "models[0].chat_roles: '' is not a role"),
        ('[[models]]\noverride_generation_config = "{}"', "models[0].override_generation_config: "),
        ("[[models]]\n[[models]]", f"models[1]: the name {DEFAULT_MODEL} is that of models[0] too"),
        (
            '[[models]]\nserved_model_name = "a,b"\n[[models]]\nserved_model_name = "c,b"',
            "models[1]: the name b is that of models[0] too; set served_model_name",
        ),
        ('[[models]]\nmodel = "/no/model"', "models[0]: there is no model at /no/model"),
    ],
)
def test_errors_in_a_file_name_their_place(text: str, message: str, tmp_path: Path) -> None:
    path = _file(tmp_path, text)
    with pytest.raises(InvalidModelsFile) as raised:
        read_models_file(path)
    assert str(raised.value).startswith(f"{path}: {message}")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidModelsFile, match=r"gone\.toml"):
        read_models_file(tmp_path / "gone.toml")


def test_errors_of_a_model_name_its_entry(tmp_path: Path) -> None:
    path = _file(tmp_path, f'[[models]]\nmodel = "{tmp_path}"\nrevision = "v1"\nserved_model_name = "a"')
    (model,) = read_models_file(path)
    with pytest.raises(ModelNotFound, match=rf"^{path}: models\[0\]: QUIRE_REVISION is v1"):
        model.check()
    with pytest.raises(ModelNotFound, match=rf"^{path}: models\[0\]: QUIRE_REVISION is v1"):
        model.resolve()


def test_names_are_separated_by_commas() -> None:
    assert split_names("") == ()
    assert split_names("owner/name , b.c-d_e") == ("owner/name", "b.c-d_e")


@pytest.mark.parametrize("names", ["a,,b", " ", "a b", "a/b/c", "/a", "-a", "a,a", "ä"])
@pytest.mark.parametrize("kind", [GatewaySettings, SupervisorSettings, WorkerSettings])
def test_a_name_that_cannot_be_is_refused_by_its_setting(
    names: str,
    kind: type[GatewaySettings] | type[SupervisorSettings] | type[WorkerSettings],
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        read_settings(kind, [f"--served-model-name={names}"])
    assert "QUIRE_SERVED_MODEL_NAME (--served-model-name): " in capsys.readouterr().err


@pytest.mark.parametrize("roles", ["a,,b", " ", "a b", "<|a|>", "ä", "a" * 65])
@pytest.mark.parametrize("kind", [GatewaySettings, SupervisorSettings])
def test_a_role_that_cannot_be_is_refused_by_its_setting(
    roles: str, kind: type[GatewaySettings] | type[SupervisorSettings], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        read_settings(kind, [f"--chat-roles={roles}"])
    assert "QUIRE_CHAT_ROLES (--chat-roles): " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (GatewaySettings, "model", "tiny"),
        (GatewaySettings, "served_model_name", "tiny"),
        (GatewaySettings, "chat_template", "{{ messages }}"),
        (GatewaySettings, "chat_template_kwargs", "{}"),
        (GatewaySettings, "chat_roles", "ipython"),
        (GatewaySettings, "tool_format", "hermes"),
        (GatewaySettings, "reasoning_format", "none"),
        (GatewaySettings, "generation_config", "model"),
        (GatewaySettings, "override_generation_config", "{}"),
        (GatewaySettings, "task", "embed"),
        (SupervisorSettings, "model", "tiny"),
        (SupervisorSettings, "revision", "v1"),
        (SupervisorSettings, "tokenizer", "tiny"),
        (SupervisorSettings, "tokenizer_revision", "v1"),
        (SupervisorSettings, "served_model_name", "tiny"),
        (SupervisorSettings, "task", "generate"),
        (SupervisorSettings, "workers", "2"),
    ],
)
def test_a_file_of_models_excludes_settings_of_one_model(
    kind: type[GatewaySettings] | type[SupervisorSettings],
    name: str,
    value: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(f"QUIRE_{name.upper()}", value)
    with pytest.raises(SystemExit):
        read_settings(kind, ["--models", "models.toml"])
    message = f"QUIRE_MODELS (--models): cannot be set together with QUIRE_{name.upper()}"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("kind", [GatewaySettings, SupervisorSettings])
def test_an_empty_setting_is_an_absent_one(
    kind: type[GatewaySettings] | type[SupervisorSettings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _file(tmp_path, '[[models]]\nserved_model_name = "a"')
    for name in ("QUIRE_MODEL", "QUIRE_SERVED_MODEL_NAME"):
        monkeypatch.setenv(name, "")
    (model,) = read_settings(kind, ["--models", str(path)]).model_settings()
    assert model.names == ("a",)
    monkeypatch.setenv("QUIRE_MODELS", "")
    (model,) = read_settings(kind, ["--served-model-name", "b"]).model_settings()
    assert model.names == ("b",)


def test_one_model_has_its_settings() -> None:
    named = ["--model", "owner/name", "--revision", "v1", "--tokenizer", "other", "--tokenizer-revision", "v2"]
    more = [
        "--served-model-name",
        "a,b",
        "--chat-template",
        "t",
        "--chat-template-kwargs",
        "{}",
        "--chat-roles",
        "r, s",
    ]
    formats = ["--tool-format", "json", "--reasoning-format", "none"]
    rest = ["--generation-config", "auto", "--override-generation-config", "{}"]
    settings = read_settings(GatewaySettings, [*named, *more, *formats, *rest])
    assert settings.model_settings() == [
        ModelSettings(
            "owner/name", "v1", "other", "v2", ("a", "b"), "t", "{}", ("r", "s"), "json", "none", "auto", "{}"
        )
    ]
    (supervised,) = read_settings(SupervisorSettings, [*named, "--workers", "3"]).model_settings()
    assert supervised == ModelSettings("owner/name", "v1", "other", "v2", workers=3)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ('{"architectures": ["BertModel"]}', ModelTask.EMBED),
        ('{"architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}}', ModelTask.SCORE),
        (
            '{"architectures": ["BertForSequenceClassification"], "id2label": {"0": "no", "1": "yes"}}',
            ModelTask.CLASSIFY,
        ),
        ('{"architectures": ["BertForSequenceClassification"], "num_labels": 1}', ModelTask.SCORE),
        ('{"architectures": ["BertForSequenceClassification"]}', ModelTask.CLASSIFY),  # of two labels, without names
        ('{"architectures": ["GPT2LMHeadModel"]}', ModelTask.GENERATE),
        ('{"architectures": ["LlamaForCausalLM"]}', ModelTask.GENERATE),
        ("{}", ModelTask.GENERATE),
        ("[", ModelTask.GENERATE),
    ],
)
def test_the_class_of_a_model_is_its_task(config: str, expected: ModelTask, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)
    assert ModelSettings(model=str(tmp_path)).model_task is ModelTask.GENERATE  # its tokenizer is missing
    (tmp_path / "tokenizer.json").write_text("{}")
    assert ModelSettings(model=str(tmp_path)).model_task is expected


@pytest.mark.parametrize(
    ("modules", "chosen", "expected"),
    [
        (["Transformer", "Pooling", "Normalize"], "auto", ModelTask.EMBED),
        (["Transformer"], "auto", ModelTask.GENERATE),
        (["Transformer", "Pooling"], "generate", ModelTask.GENERATE),
        ([], "embed", ModelTask.EMBED),
        ([], "pooling", ModelTask.EMBED),
        (["Transformer", "LogitScore"], "auto", ModelTask.SCORE),
        (["Transformer", "LogitScore"], "pooling", ModelTask.SCORE),
        (["Transformer", "LogitScore"], "generate", ModelTask.GENERATE),
    ],
)
def test_modules_make_a_decoder_one_that_embeds_or_scores(
    modules: list[str], chosen: str, expected: ModelTask, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    (tmp_path / "tokenizer.json").write_text("{}")
    files = [{"type": f"sentence_transformers.models.{kind}"} for kind in modules]
    (tmp_path / "modules.json").write_text(json.dumps(files))
    assert ModelSettings(model=str(tmp_path), task=chosen).model_task is expected


@pytest.mark.parametrize(("num_labels", "expected"), [(1, ModelTask.SCORE), (3, ModelTask.CLASSIFY)])
def test_pooling_is_what_a_head_computes_where_there_is_one(
    num_labels: int, expected: ModelTask, tmp_path: Path
) -> None:
    config = {"architectures": ["BertForSequenceClassification"], "num_labels": num_labels}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert task_of(tmp_path, "pooling") is expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"id2label": {"10": "k", "2": "c", "1": "b"}}, ("b", "c", "k")),
        ({"id2label": {"0": "\ud83d", "1": "\ud83d\ude00"}}, ("?", "😀")),  # UTF-8 has no half of a pair
        ({"num_labels": 3}, ("LABEL_0", "LABEL_1", "LABEL_2")),
        ({}, ("LABEL_0", "LABEL_1")),
        ({"architectures": ["BertModel"], "id2label": {"0": "a"}}, ()),
        ({"architectures": "BertForSequenceClassification"}, ()),
    ],
)
def test_labels_are_those_that_transformers_reads(
    config: dict[str, Any], expected: tuple[str, ...], tmp_path: Path
) -> None:
    whole = {"architectures": ["BertForSequenceClassification"], **config}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    assert labels_of(tmp_path) == expected


def test_a_config_that_cannot_be_read_has_no_labels(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[1]")
    assert labels_of(tmp_path) == ()


@pytest.mark.parametrize("modules", ["null", "3", "{}", "[1]", "["])
def test_modules_of_another_form_are_refused(modules: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    (tmp_path / "modules.json").write_text(modules)
    with pytest.raises(ModelNotFound, match=r"modules\.json"):
        task_of(tmp_path)


@pytest.mark.parametrize("config", ["null", "3", '{"architectures": 3}'])
def test_a_config_of_another_form_names_no_class(config: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)
    assert task_of(tmp_path) is ModelTask.GENERATE
