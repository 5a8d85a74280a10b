"""A step on a GPU without a wait: inputs copied, tokens fed and drawn, all on the device, in stream order."""
