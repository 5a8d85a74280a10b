"""Prometheus metrics that the engine measures as it goes."""

from prometheus_client import Counter, Gauge, Histogram

from scheduler_svc.step_responses import InvalidPart

STEP_SECONDS = Histogram(
    "quire_scheduler_step_seconds",
    "Time that the scheduler takes for a step",
    ["part"],
    buckets=(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1),
)
SCHEDULE_SECONDS, COMMIT_SECONDS = STEP_SECONDS.labels("schedule"), STEP_SECONDS.labels("commit")

PREEMPTION_SECONDS = Histogram(
    "quire_preemption_estimate_seconds",
    "Estimated time to swap a preempted sequence out and in, and to recompute it, when one of the two was chosen",
    ["model", "method"],
    buckets=(0.0001, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0),
)

RESPONSES_REFUSED = Counter(
    "quire_responses_refused_total", "Answers of workers that were refused, each with its step stream", ["reason"]
)
for _part in InvalidPart:  # `increase()` does not count the event that a series begins with
    RESPONSES_REFUSED.labels(_part.value)

REQUESTS_TAKEN_OVER = Counter("quire_requests_taken_over_total", "Requests that were taken over from an earlier term")
REQUESTS_ATTACHED = Counter("quire_requests_attached_total", "Attaches of gateways to requests that have output")
BLOCKS_RESTORED = Counter(
    "quire_blocks_restored_total", "Cached blocks found again on a worker when a scheduler connected to it"
)
EVICTION_POLICY = Gauge(
    "quire_store_eviction_policy",
    "1 for the maxmemory-policy of Redis; `unknown` where it cannot be read",
    ["policy"],
)
LEADER = Gauge("quire_leader", "1 while this scheduler leads")
RESIGNATIONS = Counter(
    "quire_resignations_total",
    "Terms of this scheduler that ended because a part of it failed, by the part and the class of the exception",
    ["part", "error"],
)
