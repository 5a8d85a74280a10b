"""A module for each architecture, named as its `model_type`, whose ARCHITECTURE says how its models are described."""
