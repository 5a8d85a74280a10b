"""The chart of a run: well-formed SVG, with a line for each series over the whole time."""

from xml.etree import ElementTree

from benchmarks.simulator.arrivals import OpenLoop
from benchmarks.simulator.driver import Setup
from benchmarks.simulator.presets import GPU_8B
from benchmarks.simulator.simulation import Simulation
from benchmarks.simulator.synthetic import ArrivalStream, Lengths
from benchmarks.simulator.timeline import draw_timeline

SVG = "{http://www.w3.org/2000/svg}"


def test_every_line_has_a_point_for_each_sample_but_the_first() -> None:
    setup = Setup(GPU_8B)
    simulation = Simulation(setup, OpenLoop(ArrivalStream(50.0, Lengths(16, 64), Lengths(4, 16)).arrivals(0, 100)))
    simulation.run()
    samples = simulation.recorder.timeline.samples
    root = ElementTree.fromstring(draw_timeline(samples, setup))
    lines = [line.attrib["points"].split() for line in root.iter(f"{SVG}polyline")]
    assert [len(line) for line in lines] == [len(samples) - 1] * 6
    texts = {text.text for text in root.iter(f"{SVG}text")}
    assert {"device, in use", "device, cached", "host, in use", "host, cached", "seconds"} <= texts
