"""Every registered family of decoders is served on meta tensors."""

from benchmarks.aot.families import family_configs
from benchmarks.aot.serving import MODELS
from worker_svc.model.architecture import architecture_names


def test_only_encoders_are_left_out() -> None:
    configs = family_configs(MODELS)
    assert set(architecture_names()) - set(configs) == {"bert", "roberta", "xlm_roberta"}
    assert configs["deepseek_v2"] is MODELS["deepseek_v2"]
    assert all(config["architectures"] for config in configs.values())
