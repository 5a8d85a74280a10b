"""The setting of schedulers and gateways that limits how long records of requests are kept."""

RECORD_TTL_SECONDS = 3600
RECORD_TTL = "the most seconds that a request's record is kept after its end, and the default for requests with a name"
"""The description of the setting."""
