"""A module for each format of weights, named as its `quant_method`, whose FORMAT reads it."""
