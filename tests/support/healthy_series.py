"""Series as promtool takes them, of a deployment in which nothing is wrong."""


def calls(code: str, method: str = "/v1/completions", protocol: str = "http") -> str:
    """The series of calls that end with a code."""
    labels = f'instance="g0",model="m",protocol="{protocol}",method="{method}",code="{code}"'
    return f"quire_gateway_requests_total{{{labels}}}"


HEALTHY = {
    'quire_leader{instance="s0"}': "1x100",
    'quire_leader{instance="s1"}': "0x100",
    'quire_workers_ready{instance="s0",model="m"}': "2x100",
    'quire_store_degraded{instance="s0"}': "0x100",
    'quire_store_eviction_policy{instance="s0",policy="noeviction"}': "1x100",
    'quire_responses_refused_total{instance="s0",reason="sequences"}': "0x100",
    'quire_journal_gaps_total{instance="s0"}': "3x100",
    'quire_journal_dropped_total{instance="s0"}': "3x100",
    'quire_resignations_total{instance="s1",part="journal",error="ValueError"}': "3x100",
    'quire_worker_failed_steps_total{instance="w0"}': "3x100",
    'quire_worker_out_of_memory_total{instance="w0"}': "3x100",
    'quire_worker_memory_pressure{instance="w0"}': "1x100",
    'quire_gateway_requests_in_flight{instance="g0",model="m"}': "0x100",
    calls("200"): "0+20x100",
    calls("500"): "3x100",
    calls("503"): "0+1x100",
    calls("503", "/health"): "0+30x100",  # probes of a gateway that is not ready
}
"""Series of a deployment that has had errors, but not of late. They have a value every 15 s."""
