"""Pages with sections that programs write, between comments that name them."""

import re
from collections.abc import Mapping


def with_sections(text: str, sections: Mapping[str, str]) -> str:
    """The page with these sections, by name. Raises ValueError where it does not have each of them once."""
    for name, section in sections.items():
        marks = rf"(<!-- {name}: [^>]*-->\n)(.*?)(<!-- end of {name} -->)"
        text, count = re.subn(marks, lambda match: f"{match[1]}\n{section}\n{match[3]}", text, flags=re.DOTALL)  # noqa: B023
        if count != 1:
            raise ValueError(f"{count} sections {name}")
    return text
