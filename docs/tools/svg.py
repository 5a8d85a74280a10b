"""Boxes, arrows and text as SVG."""

from html import escape

INK, GREY, BLUE, PAPER = "#1a202c", "#4a5568", "#2b6cb0", "#fbfaf7"
_FONT = "system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"
_HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="{font}" font-size="13">
<title>{title}</title>
<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" \
orient="auto-start-reverse"><path d="M0 0 10 5 0 10z" fill="{grey}"/></marker></defs>
<rect width="{width}" height="{height}" rx="10" fill="{paper}"/>"""


class Drawing:
    """An SVG of a fixed size, in pixels. Later shapes cover earlier ones."""

    def __init__(self, title: str, width: int, height: int) -> None:
        self._parts = [
            _HEAD.format(width=width, height=height, title=escape(title), font=_FONT, grey=GREY, paper=PAPER)
        ]

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        color: str = GREY,
        size: int = 13,
        bold: bool = False,
        at: str = "middle",
    ) -> None:
        """A line of text on the baseline `y`; `at` is what of it stands at `x`: start, middle or end."""
        weight = ' font-weight="600"' if bold else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}"{weight} text-anchor="{at}" fill="{color}">'
            f"{escape(text)}</text>"
        )

    def rect(
        self, x: float, y: float, width: float, height: float, *, fill: str = "#ffffff", dashed: bool = False
    ) -> None:
        """A rounded rectangle."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" fill="{fill}" '
            f'stroke="{INK}" stroke-width="1.3"{dash}/>'
        )

    def box(self, x: float, y: float, width: float, title: str, *lines: str, dashed: bool = False) -> None:
        """A rectangle with a title and lines of text; 28 pixels for the title and 19 for each line."""
        self.rect(x, y, width, 40 + 19 * len(lines), dashed=dashed)
        self.text(x + width / 2, y + 25, title, color=INK, size=16, bold=True)
        for place, line in enumerate(lines):
            self.text(x + width / 2, y + 46 + 19 * place, line)

    def line(self, *points: tuple[float, float], dashed: bool = False, tips: str = "", color: str = GREY) -> None:
        """A line through points; `tips` holds "start" and "end" where it has arrow heads."""
        path = "M" + " L".join(f"{x:g} {y:g}" for x, y in points)
        dash = ' stroke-dasharray="4 4"' if dashed else ""
        heads = "".join(f' marker-{end}="url(#tip)"' for end in ("start", "end") if end in tips.split())
        self._parts.append(f'<path d="{path}" fill="none" stroke="{color}" stroke-width="1.4"{dash}{heads}/>')

    def number(self, x: float, y: float, number: int) -> None:
        """A number in a filled circle."""
        self._parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="10" fill="{BLUE}"/>')
        self.text(x, y + 4.5, str(number), color="#ffffff", bold=True)

    def render(self) -> str:
        """The file."""
        return "\n".join([*self._parts, "</svg>\n"])
