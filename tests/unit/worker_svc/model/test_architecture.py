"""An architecture describes exactly the tensors that transformers has, and is found by its name."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig

import dense_models
from distributions import install, set_version
from llama_models import SIZES, VARIANTS
from runner_driver import Driver, make_runner
from worker_svc.errors import StartupFailed, UnsupportedModel
from worker_svc.fingerprint import model_fingerprint
from worker_svc.model.architecture import architecture_names, architecture_of, describe, origin_of
from worker_svc.model.config import read_config
from worker_svc.model.description import ExpertsSpec, ModelDescription
from worker_svc.model.description_cache import description_of
from worker_svc.model.formats.dense import DenseFormat
from worker_svc.model.stored_linear import shapes_of

Save = Callable[..., Path]
Publish = Callable[[str, str, str], None]

# Another package's architecture: a Llama by another name.
_THEIRS = """
from functools import partial

from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_decoder import Windows, describe_decoder


class TheirConfig(LlamaConfig):
    model_type = "theirs"


class TheirForCausalLM(LlamaForCausalLM):
    config_class = TheirConfig


AutoConfig.register("theirs", TheirConfig, exist_ok=True)
AutoModelForCausalLM.register(TheirConfig, TheirForCausalLM, exist_ok=True)
ARCHITECTURE = Architecture(__file__, "TheirForCausalLM", partial(describe_decoder, windows=Windows.NONE))
"""


@pytest.fixture
def publish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Publish:
    """Creates a distribution that registers what its module defines."""

    def publish(distribution: str, name: str, source: str) -> None:
        entry_point = f"{name} = {distribution}_models:ARCHITECTURE"
        install(monkeypatch, tmp_path / distribution, distribution, "quire.models", entry_point, source)

    return publish


def _shapes(description: ModelDescription) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that a description names."""
    shapes = dict(description.shapes)
    of_experts = set()
    for mixture in (layer.mlp for layer in description.layers if isinstance(layer.mlp, ExpertsSpec)):
        # transformers has one tensor of all experts.
        assert mixture.fused is not None
        of_experts |= {linear for mlp in mixture.experts for linear in (mlp.gate_up, mlp.down)}
        count, width, hidden = len(mixture.experts), mixture.experts[0].width, description.hidden_size
        shapes |= zip(mixture.fused, ((count, 2 * width, hidden), (count, hidden, width)), strict=True)
    for linear in description.linear_layers:
        for stored in () if linear in of_experts else linear.stored:
            shapes |= shapes_of(stored, linear.inputs, DenseFormat())
    return shapes


@pytest.mark.parametrize("variant", VARIANTS | dense_models.VARIANTS)
def test_tensors_are_those_of_transformers(variant: str) -> None:
    config = (VARIANTS | dense_models.VARIANTS)[variant]()
    description = describe(config)
    assert description is not None
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    assert _shapes(description) == {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES, architectures=["LlamaForTokenClassification"]),
        LlamaConfig(**SIZES, hidden_act="tanh"),
        LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}),
        MistralConfig(**SIZES, architectures=["LlamaForCausalLM"]),
    ],
    ids=["head", "activation", "rope", "class"],
)
def test_what_a_description_cannot_hold_is_not_described(config: Any) -> None:
    assert describe(config) is None


def test_the_classes_of_each_architecture_are_those_of_transformers() -> None:
    for name in architecture_names():
        architecture = architecture_of(name)
        assert architecture is not None
        for class_name in (architecture.class_name, *architecture.other_class_names):
            assert hasattr(transformers, class_name), class_name


def test_sizes_that_do_not_fit_each_other_are_refused() -> None:
    config = LlamaConfig(**SIZES | {"num_key_value_heads": 4})
    with pytest.raises(UnsupportedModel, match="this llama model do not fit each other: num_heads: must be a multiple"):
        describe(config)


def test_an_architecture_of_another_package_is_served(
    publish: Publish, save_model: Save, reference: Callable[..., list[list[int]]]
) -> None:
    publish("theirs", "theirs", _THEIRS)
    architecture = architecture_of("theirs")
    assert architecture is not None
    assert architecture.class_name == "TheirForCausalLM"
    assert (origin_of("theirs"), origin_of("llama")) == ("theirs 1.0", "")
    directory = save_model(sys.modules["theirs_models"].TheirConfig(**SIZES))
    assert json.loads((directory / "config.json").read_text())["model_type"] == "theirs"
    prompts = [[1, 2, 3], list(range(40))]
    described = describe(read_config(directory))
    assert described is not None
    for kernels in ("torch", "compiled"):
        runner = make_runner(directory, kernels, description=described)
        assert Driver(runner).generate(prompts, 8) == reference(directory, prompts, 8)


def test_a_config_that_a_package_registers_is_read_before_anything_else_imports_the_package(
    publish: Publish, tmp_path: Path
) -> None:
    publish("unread", "unread", _THEIRS.replace("theirs", "unread"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unread", "architectures": ["TheirForCausalLM"]}))
    assert read_config(tmp_path).model_type == "unread"


def test_a_name_that_two_packages_register_is_refused(publish: Publish) -> None:
    publish("usurper", "llama", _THEIRS)
    with pytest.raises(StartupFailed, match="llama is registered by several packages: quire, usurper"):
        architecture_of("llama")
    publish("first", "new", _THEIRS)
    publish("second", "new", _THEIRS)
    with pytest.raises(StartupFailed, match="new is registered by several packages: first, second"):
        architecture_of("new")


def test_a_package_that_cannot_be_imported_is_named(publish: Publish) -> None:
    publish("broken", "broken", "import no_such_module_at_all")
    with pytest.raises(StartupFailed, match=r"broken of the package broken cannot be loaded: .*no_such_module_at_all"):
        architecture_of("broken")
    assert architecture_of("llama") is not None


def test_a_value_that_is_no_architecture_is_refused_by_its_package(publish: Publish) -> None:
    publish("numbered", "numbered", "ARCHITECTURE = 7")
    message = "quire.models: numbered of the package numbered must be an Architecture, not of the type int"
    with pytest.raises(StartupFailed, match=f"^{message}$"):
        architecture_of("numbered")


@pytest.mark.parametrize("error", [ValueError, KeyError, ZeroDivisionError])
def test_an_architecture_that_fails_is_named(error: type[Exception], publish: Publish) -> None:
    source = """
from worker_svc.model.architecture import Architecture

def describe(config):
    raise ERROR("hidden_sizes")

ARCHITECTURE = Architecture(__file__, "FailingForCausalLM", describe)
"""
    publish("failing", "failing", source.replace("ERROR", error.__name__))
    config: Any = LlamaConfig(**SIZES)
    config.model_type = "failing"
    message = f"quire.models: failing of the package failing failed: {error.__name__}: .*hidden_sizes"
    with pytest.raises(StartupFailed, match=message) as raised:
        describe(config)
    assert not isinstance(raised.value, UnsupportedModel)


def _model_of_theirs(directory: Path) -> Path:
    (directory / "config.json").write_text(json.dumps({"model_type": "theirs"}))
    save_file({}, directory / "model.safetensors")
    return directory


def test_the_fingerprint_changes_with_the_package_of_an_architecture(publish: Publish, tmp_path: Path) -> None:
    publish("theirs", "theirs", _THEIRS)
    directory = _model_of_theirs(tmp_path)
    fingerprints = [model_fingerprint(directory, torch.float32) for _ in range(2)]
    set_version(tmp_path / "theirs", "theirs", "1.1")
    fingerprints.append(model_fingerprint(directory, torch.float32))
    with (tmp_path / "theirs" / "theirs_models.py").open("a") as source:
        source.write("# fixed\n")
    fingerprints.append(model_fingerprint(directory, torch.float32))
    assert fingerprints[0] == fingerprints[1]
    assert len(set(fingerprints)) == 3


def test_an_architecture_whose_source_cannot_be_read_is_refused_by_its_package(
    publish: Publish, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    publish("theirs", "theirs", _THEIRS.replace("__file__", "'/gone/theirs.py'"))
    directory = _model_of_theirs(tmp_path)
    message = "^quire.models: theirs of the package theirs failed: FileNotFoundError: .*/gone/theirs.py"
    with pytest.raises(StartupFailed, match=message):
        description_of(directory)
    with pytest.raises(StartupFailed, match=message):
        model_fingerprint(directory, torch.float32)


def test_an_unknown_name_is_no_architecture() -> None:
    assert architecture_of("none-such") is None
    assert architecture_of("_decoder") is None
