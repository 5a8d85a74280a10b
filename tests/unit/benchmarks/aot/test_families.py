"""Every registered family is served on meta tensors."""

from benchmarks.aot.families import encoder_descriptions, family_configs
from benchmarks.aot.serving import MODELS
from worker_svc.model.architecture import architecture_names


def test_none_is_left_out() -> None:
    configs, encoders = family_configs(MODELS), encoder_descriptions(MODELS)
    rotary = {"gte", "nomic_bert"}
    assert encoders.keys() == rotary | {"bert", "camembert", "distilbert", "electra", "mpnet", "roberta", "xlm_roberta"}
    # These are computed as decoders are, in both directions, which the Triton kernels leave to torch.
    assert set(architecture_names()) == configs.keys() | encoders.keys() | {"eurobert", "modernbert"}
    assert configs["deepseek_v2"] is MODELS["deepseek_v2"]
    assert all(config["architectures"] for config in configs.values())
