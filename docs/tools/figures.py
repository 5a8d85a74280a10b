"""Draws the figures in docs/figures: `python -m docs.tools.figures`."""

from collections.abc import Callable
from pathlib import Path

from docs.tools.svg import BLUE, INK, Drawing

FOLDER = Path(__file__).parents[1] / "figures"


def system() -> str:
    """The processes, and what goes between them."""
    d = Drawing("The processes of Quire and what they send each other", 960, 420)
    d.box(20, 70, 150, "clients", "any gRPC client", "OpenAI HTTP clients", "Python client, CLI", dashed=True)
    d.rect(266, 62, 168, 97)
    d.box(260, 70, 168, "gateway × n", "validates, tokenizes", "detokenizes, finds", "stop strings")
    d.rect(536, 62, 178, 97)
    d.box(530, 70, 178, "scheduler", "queue, block tables", "prefix index", "leader and standbys")
    d.rect(796, 62, 150, 97)
    d.box(790, 70, 150, "worker × n", "model, KV blocks", "forward pass", "sampling")
    for left, right, upper, lower in (
        (170, 260, "text", ""),
        (428, 530, "session", "stream"),
        (708, 790, "step", "stream"),
    ):
        d.line((left + 4, 118), (right - 4, 118), tips="start end")
        d.text((left + right) / 2, 108, upper, color=BLUE, bold=True)
        if lower:
            d.text((left + right) / 2, 136, lower, color=BLUE, bold=True)
    d.text(344, 40, "Text stays on this side.", size=12)
    d.text(750, 40, "Token ids, block ids and log-probabilities cross the inner streams.", size=12)
    d.box(530, 270, 178, "Redis", "lease of the leader", "records and tokens")
    d.line((619, 171), (619, 266), tips="start end")
    d.text(630, 215, "journal: writes after steps;", size=12, at="start")
    d.text(630, 232, "the lease", size=12, at="start")
    d.box(260, 270, 168, "OpenTelemetry", "collector: one trace", "for each request", dashed=True)
    d.line((344, 171), (344, 266), dashed=True, tips="end")
    d.line((565, 171), (565, 222), (400, 222), (400, 266), dashed=True, tips="end")
    d.line((865, 171), (865, 380), (344, 380), (344, 352), dashed=True, tips="end")
    d.text(480, 405, "Dashed: optional, or not part of Quire. Prometheus reads /metrics of every process.", size=12)
    return d.render()


_LIFELINES = {"client": 90, "gateway": 280, "scheduler": 500, "worker": 700, "Redis": 870}


def request() -> str:
    """The way of a request through the processes; the numbers are those of ARCHITECTURE.md."""
    d = Drawing("A request's way through client, gateway, scheduler, worker and Redis", 960, 640)
    for name, x in _LIFELINES.items():
        d.line((x, 64), (x, 624), color="#a0aec0", dashed=True)
        d.rect(x - 60, 24, 120, 40)
        d.text(x, 49, name, color=INK, size=15, bold=True)

    def message(y: float, start: str, end: str, text: str, number: int | None = None, dashed: bool = False) -> None:
        left, right = _LIFELINES[start], _LIFELINES[end]
        d.line((left, y), (right, y), tips="end", dashed=dashed)
        middle = (left + right) / 2
        d.text(middle, y - 7, text, size=12, color=INK)
        if number is not None:
            d.number(min(left, right) - 16, y, number)

    def work(y: float, at: str, *lines: str, number: int | None = None) -> None:
        x, height = _LIFELINES[at], 12 + 17 * len(lines)
        d.rect(x - 94, y, 188, height, fill="#ebf4ff")
        for place, line in enumerate(lines):
            d.text(x, y + 18 + 17 * place, line, size=12, color=INK)
        if number is not None:
            d.number(x - 104, y + height / 2, number)

    message(98, "client", "gateway", "request: text or chat", 1)
    work(112, "gateway", "authenticate, validate,", "template, tokenize", number=2)
    message(186, "gateway", "scheduler", "Submit: token ids, limits")
    message(216, "scheduler", "Redis", "record of the request", 3)
    message(244, "scheduler", "gateway", "Accepted")
    d.rect(20, 262, 920, 346, fill="none", dashed=True)
    d.text(102, 282, "each step", size=12, bold=True, at="start")
    work(276, "scheduler", "schedule(): order, prefix", "hits, blocks, preemption", number=4)
    message(344, "scheduler", "worker", "StepRequest", 5)
    work(358, "worker", "swap and copy blocks,", "forward pass, sample", number=6)
    message(426, "worker", "scheduler", "StepResponse: tokens")
    work(438, "scheduler", "commit(): tokens, hashes", "and ends, free blocks", number=7)
    message(508, "scheduler", "Redis", "append tokens; no step waits", dashed=True)
    message(508, "scheduler", "gateway", "events: tokens")
    work(518, "gateway", "detokenize,", "find stop strings", number=8)
    message(592, "gateway", "client", "text")
    message(592, "gateway", "scheduler", "Finish, if a stop string matched")
    return d.render()


_LANES = {"Redis": 52, "gateways": 114, "scheduler": 176, "worker thread": 252, "device": 314}
_COLORS = {1: "#bee3f8", 2: "#c6f6d5", 3: "#feebc8", 4: "#e9d8fd"}
_LEFT, _UNIT = 136, 62


def _x(time: float) -> float:
    return _LEFT + _UNIT * time


def step() -> str:
    """Steps over time: the next one is planned, sent and launched while the device computes the one before it."""
    d = Drawing("Four steps over time, pipelined", 960, 400)
    d.text(480, 28, "Two steps are in flight: one runs on the device, the next one is launched behind it.", color=INK)
    for name, y in _LANES.items():
        d.text(_LEFT - 14, y + 24, name, at="end", color=INK, bold=True)
        d.line((_LEFT - 4, y + 44), (944, y + 44), color="#cbd5e0")

    def piece(lane: str, begin: float, end: float, step: int, text: str) -> None:
        d.rect(_x(begin), _LANES[lane] + 4, _UNIT * (end - begin), 32, fill=_COLORS[step])
        d.text((_x(begin) + _x(end)) / 2, _LANES[lane] + 24.5, text, size=11, color=INK)

    def send(from_lane: str, begin: float, to_lane: str, end: float, dashed: bool = False) -> None:
        down = _LANES[to_lane] > _LANES[from_lane]
        start_y, end_y = _LANES[from_lane] + (36 if down else 4), _LANES[to_lane] + (4 if down else 36)
        d.line((_x(begin), start_y), (_x(end), end_y), tips="end", dashed=dashed)

    runs = {1: (1.65, 5.3), 2: (5.3, 8.95), 3: (8.95, 12.6)}
    plans = {1: 0.0, 2: 0.85, 3: 7.25, 4: 10.9}
    launches = {1: 0.85, 2: 1.75, 3: 8.05, 4: 11.7}
    for number, (begin, end) in runs.items():
        piece("device", begin, end, number, f"step {number}: copies, forward pass, sampling")
    for number, begin in plans.items():
        piece("scheduler", begin, begin + 0.75, number, f"plan {number}")
        piece("worker thread", launches[number], launches[number] + 0.85, number, f"launch {number}")
        send("scheduler", begin + 0.7, "worker thread", launches[number] + 0.1)
    for number in (1, 2):
        end = runs[number][1]
        piece("worker thread", end + 0.05, end + 0.85, number, f"finish {number}")
        piece("scheduler", end + 0.95, end + 1.85, number, f"commit {number}")
        send("worker thread", end + 0.75, "scheduler", end + 1.05)
        piece("gateways", end + 1.95, end + 3.05, number, f"tokens of {number}")
        send("scheduler", end + 1.75, "gateways", end + 2.05)
        piece("Redis", end + 2.3, end + 4.0, number, "append tokens")
        d.line((_x(end + 1.55), _LANES["scheduler"] + 4), (_x(end + 1.55), _LANES["Redis"] + 20), dashed=True)
        d.line((_x(end + 1.55), _LANES["Redis"] + 20), (_x(end + 2.28), _LANES["Redis"] + 20), dashed=True, tips="end")
    d.text(_x(2.72), _LANES["worker thread"] + 25, "launched while step 1 runs", size=11, at="start")
    note = "time →    Not to scale: a plan takes less than 1 ms, a forward pass 10 ms or more. No step waits for Redis."
    d.text(_LEFT, 386, note, size=12, at="start")
    return d.render()


FIGURES: dict[str, Callable[[], str]] = {"system": system, "request": request, "step": step}


def main() -> None:
    """Writes the files."""
    for name, draw in FIGURES.items():
        (FOLDER / f"{name}.svg").write_text(draw())


if __name__ == "__main__":
    main()
