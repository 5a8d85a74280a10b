"""Experiments by name."""

from benchmarks.simulator.scenarios.ageing import AGEING
from benchmarks.simulator.scenarios.documents import DOCUMENTS
from benchmarks.simulator.scenarios.fairness import FAIRNESS
from benchmarks.simulator.scenarios.flood import FLOOD
from benchmarks.simulator.scenarios.preemption import PREEMPTION
from benchmarks.simulator.scenarios.queue import QUEUE
from benchmarks.simulator.scenarios.scale import SCALE

SCENARIOS = {scenario.name: scenario for scenario in (FAIRNESS, FLOOD, DOCUMENTS, AGEING, PREEMPTION, QUEUE, SCALE)}
