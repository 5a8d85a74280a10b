"""One module per weight format, named by its `quant_method`; its FORMAT reads it."""
