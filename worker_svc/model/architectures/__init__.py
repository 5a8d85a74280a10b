"""One module per architecture, named by its `model_type`; its ARCHITECTURE describes the models."""
