"""How pages tell of any result: when, of which code and on what it was measured, and whether what was asked holds."""

from typing import Any


def version(result: dict[str, Any]) -> str:
    """The day, and the commit that was measured; Markdown."""
    return f"{result['date'][:10]}, commit `{(result['commit'] or 'unknown')[:12]}`"


def origin(result: dict[str, Any]) -> str:
    """The same, and the processor that it was measured on."""
    machine = result["machine"]
    return f"{version(result)}, {machine['cores']} cores of {machine['processor']}"


def mark_missed(text: str, *, holds: bool) -> str:
    """What was asked, so that nobody overlooks what was missed; Markdown."""
    return text if holds else f"**{text}: missed**"
