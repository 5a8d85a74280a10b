"""What runs a step imports neither models nor the GPU's modules: both are above it."""

from import_graph import read_imports

ABOVE_MODELS = {
    "__main__",
    "encoder.backend",
    "encoder.instance",
    "fingerprint",
    "gguf.conversion",
    "gguf.parts",
    "gguf.plan",
    "instance",
    "kernel_choice",
    "load",
    "prepare",
    "quantize",
    "service",
    "step_stream",
    "warm_up",
    "weight_sizes",
    "wire",
}
ABOVE_GPU = {"block_copier_factory", "instance", "kernel_choice"}


def test_steps_import_neither_models_nor_the_gpu() -> None:
    wrong = []
    graph = {module: imports for module, imports in read_imports().items() if module.startswith("worker_svc.")}
    assert len(graph) > 50
    for module, imported in graph.items():
        name = module.removeprefix("worker_svc.")
        if not name.startswith("model") and name not in ABOVE_MODELS:
            wrong += [(name, other) for other in imported if other.startswith("worker_svc.model.")]
        if not name.startswith(("gpu", "model.")) and name not in ABOVE_GPU:
            wrong += [(name, other) for other in imported if other.startswith("worker_svc.gpu.")]
    assert wrong == []
