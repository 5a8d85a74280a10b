"""How long records are kept: the operator's rules."""

import pytest

from gateway_svc.field_paths import contract_field_path
from gateway_svc.retention import NONE, UNTIL_END, Retention, RetentionRules
from gateway_svc.settings import GatewaySettings
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from svc_common.errors import QuireError, Reason
from svc_common.settings import read_settings

MINUTE, HOUR = Retention(is_recorded=True, seconds=60), Retention(is_recorded=True, seconds=3600)
RULES = RetentionRules(3600, None, UNTIL_END)


def resolve(
    asked: Retention | None, rules: RetentionRules = RULES, *, is_named: bool = True, limit: Retention | None = None
) -> Retention | None:
    return rules.resolve(asked, is_named=is_named, limit=limit, field_path=contract_field_path)


def test_retentions_are_in_the_order_of_what_they_keep() -> None:
    assert sorted([HOUR, UNTIL_END, MINUTE, NONE]) == [NONE, UNTIL_END, MINUTE, HOUR]


@pytest.mark.parametrize(("text", "retention"), [("none", NONE), ("until_end", UNTIL_END), ("60", MINUTE)])
def test_a_retention_is_read_from_text(text: str, retention: Retention) -> None:
    assert Retention.parse(text) == retention


def test_a_request_has_what_it_asks_for() -> None:
    for asked in (NONE, UNTIL_END, MINUTE, HOUR):
        assert resolve(asked) == resolve(asked, is_named=False) == asked
    for asked in (NONE, MINUTE, HOUR):
        assert resolve(asked, limit=HOUR) == asked


def test_named_and_unnamed_requests_have_defaults_of_their_own() -> None:
    assert (resolve(None), resolve(None, is_named=False)) == (None, UNTIL_END)
    rules = RetentionRules(3600, MINUTE, NONE)
    assert (resolve(None, rules), resolve(None, rules, is_named=False)) == (MINUTE, NONE)


def test_the_limit_of_a_key_is_its_default_where_it_is_less() -> None:
    assert resolve(None, limit=MINUTE) == MINUTE
    assert resolve(None, limit=NONE, is_named=False) == NONE


def test_until_the_end_keeps_no_more_seconds_than_the_key_allows() -> None:
    for asked in (UNTIL_END, None):
        kept = resolve(asked, is_named=False, limit=MINUTE)
        assert kept is not None
        assert kept.to_proto() == scheduler_v1.Retention(most_seconds=60)
        assert resolve(asked, is_named=False, limit=UNTIL_END) == UNTIL_END


@pytest.mark.parametrize(
    ("asked", "limit", "message"),
    [
        (Retention(is_recorded=True, seconds=3601), None, "must be at most 3600 seconds"),
        (HOUR, MINUTE, "must be at most 60 seconds, which is the limit of the API key"),
        (MINUTE, UNTIL_END, "must be at most until_end, which is the limit of the API key"),
        (UNTIL_END, NONE, "must be at most none, which is the limit of the API key"),
    ],
)
def test_more_than_is_allowed_is_rejected(asked: Retention, limit: Retention | None, message: str) -> None:
    with pytest.raises(QuireError, match=message) as error:
        resolve(asked, limit=limit)
    assert (error.value.reason, error.value.field) == (Reason.INVALID_FIELD, "retention")


def test_the_defaults_are_settings() -> None:
    flags = ["--record-ttl", "100", "--named-retention", "60", "--unnamed-retention", "none"]
    assert read_settings(GatewaySettings, flags).retention_rules == RetentionRules(100, MINUTE, NONE)


@pytest.mark.parametrize("value", ["", "0", "-1", "soon", "3601"])
def test_a_bad_default_is_named(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("named", "unnamed"):
        with pytest.raises(SystemExit):
            read_settings(GatewaySettings, [f"--{name}-retention", value])
        assert f"QUIRE_{name.upper()}_RETENTION" in capsys.readouterr().err
