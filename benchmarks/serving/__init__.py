"""Quire beside other servers on the same machine, model and load."""
