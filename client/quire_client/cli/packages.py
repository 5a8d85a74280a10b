"""What the command line needs besides the client."""

MISSING = "quire: the command line needs more packages: pip install typer rich aiohttp shtab"
"""The error where one of them is not installed."""
