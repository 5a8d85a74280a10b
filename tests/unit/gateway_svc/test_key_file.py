"""The file of API keys."""

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path

import pytest

from gateway_svc.key_file import MIN_KEY_LENGTH, ApiKey, KeyFile, read_key_file
from gateway_svc.key_tables import InvalidKeyFile
from gateway_svc.retention import NONE, UNTIL_END, Retention
from gateway_svc.tenant import AccountLimits, Tenant

KEY = '[[keys]]\nkey = "secret-secret-secret"\n'
OTHER = '[[keys]]\nkey = "secret-other-secret"\n'


def read(tmp_path: Path, text: str) -> Sequence[ApiKey]:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    return read_key_file(path).keys


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def test_a_key_has_a_tenant_and_the_limits_of_its_account(tmp_path: Path) -> None:
    text = """
        [[keys]]
        key = "a long random string"
        tenant = "search"
        name = "batch"
        weight = 2
        max_priority = -3
        max_running = 8
        max_queued = 100
        max_kv_blocks = 5_000
        tokens_per_minute = 100_000
        requests_per_minute = 60
        cached_token_factor = 0.25
        models = ["small", "large"]
        retention = "until_end"
        expires = 2030-01-31T12:00:00+01:00
    """
    limits = AccountLimits("search/batch", 8, 100, 5_000, 100_000, 60, 0.25)
    tenant = Tenant("search", 2.0, limits, -3, frozenset({"small", "large"}), UNTIL_END)
    assert read(tmp_path, text) == [ApiKey(digest("a long random string"), tenant, 1_896_087_600.0)]
    proto = limits.to_proto()
    assert {field.name: value for field, value in proto.ListFields()} == {
        "account": "search/batch",
        "max_running": 8,
        "max_queued": 100,
        "max_kv_blocks": 5_000,
        "tokens_per_minute": 100_000,
        "requests_per_minute": 60,
        "cached_token_factor": 0.25,
    }


def test_a_key_without_limits_may_not_raise_its_priority(tmp_path: Path) -> None:
    sha256 = hashlib.sha256(b"short").hexdigest().upper()
    (key,) = read(tmp_path, f'[[keys]]\nsha256 = "{sha256}"\ntenant = "bob"')
    assert key == ApiKey(digest("short"), Tenant("bob", 1.0, AccountLimits("bob/"), max_priority=0))
    assert [field.name for field, _ in AccountLimits("bob/").to_proto().ListFields()] == ["account"]


@pytest.mark.parametrize(
    ("value", "retention"),
    [('"none"', NONE), ('"until_end"', UNTIL_END), ("60", Retention(is_recorded=True, seconds=60))],
)
def test_a_key_may_limit_how_long_records_are_kept(tmp_path: Path, value: str, retention: Retention) -> None:
    (key,) = read(tmp_path, f'{KEY}tenant = "a"\nretention = {value}')
    assert key.tenant.retention == retention


@pytest.mark.parametrize(
    "expires", ["2030-01-31T12:00:00Z", '"2030-01-31T12:00:00Z"', '"2030-01-31T13:00:00+01:00"'], ids=repr
)
def test_an_expiry_may_be_a_date_or_a_string(tmp_path: Path, expires: str) -> None:
    (key,) = read(tmp_path, f'{KEY}tenant = "a"\nexpires = {expires}')
    assert key.expires == 1_896_091_200.0


def test_keys_of_one_tenant_and_name_share_an_account(tmp_path: Path) -> None:
    text = f'{KEY}tenant = "a"\nmax_running = 1\nmax_priority = 5\n{OTHER}tenant = "a"\nmax_running = 1'
    one, other = read(tmp_path, text)
    assert one.tenant.limits == other.tenant.limits == AccountLimits("a/", max_running=1)
    text = f'{KEY}tenant = "a"\nmax_running = 1\n{OTHER}tenant = "a"\nname = "b"\nmax_running = 2'
    assert [key.tenant.limits for key in read(tmp_path, text)] == [
        AccountLimits("a/", max_running=1),
        AccountLimits("a/b", max_running=2),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "there is no [[keys]] table"),
        ("keys = 1", "there is no [[keys]] table"),
        ("keys = [1]", "keys[0] is not a table"),
        ('[[keys]]\ntenant = "a"', "keys[0] needs either key or sha256"),
        (f'{KEY}sha256 = "x"\ntenant = "a"', "keys[0] needs either key or sha256"),
        ('[[keys]]\nkey = " secret-secret-secret"\ntenant = "a"', "keys[0].key is not a string of ASCII"),
        ('[[keys]]\nkey = "secret-secret-sécret"\ntenant = "a"', "keys[0].key is not a string of ASCII"),
        ("[[keys]]\nkey = 1234567890123456\ntenant = 'a'", "keys[0].key is not a string of ASCII"),
        ('[[keys]]\nkey = "secret-and-more"\ntenant = "a"', "keys[0].key has 15 characters, and needs at least 16"),
        ('[[keys]]\nsha256 = "secret"\ntenant = "a"', "keys[0].sha256 is not 64 hexadecimal digits"),
        (KEY, "keys[0].tenant is missing"),
        (f'{KEY}tenant = ""', "keys[0].tenant is not a non-empty string"),
        (f'{KEY}tenant = "a"\n{OTHER}tenant = 1', "keys[1].tenant is not a non-empty string"),
        (f'{KEY}tenant = "a"\nname = "b/c"', "keys[0].name is not 1 to 64 letters"),
        (f'{KEY}tenant = "a"\nname = ""', "keys[0].name is not 1 to 64 letters"),
        (f'{KEY}tenant = "a"\nweight = 0', "keys[0].weight is not above 0"),
        (f'{KEY}tenant = "a"\nweight = nan', "keys[0].weight is not a finite number"),
        (f'{KEY}tenant = "a"\nweight = 1{"0" * 400}', "keys[0].weight is not a finite number"),
        (f'{KEY}tenant = "a"\nmodels = {"[" * 100_000}', "maximum recursion depth"),
        (f'{KEY}tenant = "a"\nweight = true', "keys[0].weight is not a finite number"),
        (f'{KEY}tenant = "a"\nquota = 1', "keys[0] has the unknown field quota"),
        (f'{KEY}tenant = "a"\nmax_priority = 1.5', "keys[0].max_priority is not an integer from -2147483648 to"),
        (f'{KEY}tenant = "a"\nmax_priority = 2147483648', "keys[0].max_priority is not an integer"),
        (f'{KEY}tenant = "a"\nretention = 0', 'keys[0].retention is not "none", "until_end" or an integer'),
        (f'{KEY}tenant = "a"\nretention = true', "keys[0].retention is not"),
        (f'{KEY}tenant = "a"\nretention = "60"', "keys[0].retention is not"),
        (f'{KEY}tenant = "a"\nmax_running = 0', "keys[0].max_running is not an integer from 1 to 2147483647"),
        (f'{KEY}tenant = "a"\nmax_running = true', "keys[0].max_running is not an integer"),
        (f'{KEY}tenant = "a"\nmax_queued = -1', "keys[0].max_queued is not an integer"),
        (f'{KEY}tenant = "a"\nmax_kv_blocks = "9"', "keys[0].max_kv_blocks is not an integer"),
        (f'{KEY}tenant = "a"\ntokens_per_minute = 0', "keys[0].tokens_per_minute is not an integer from 1 to"),
        (f'{KEY}tenant = "a"\nrequests_per_minute = inf', "keys[0].requests_per_minute is not an integer"),
        (f'{KEY}tenant = "a"\ncached_token_factor = 1.1', "keys[0].cached_token_factor is not from 0 to 1"),
        (f'{KEY}tenant = "a"\ncached_token_factor = "1"', "keys[0].cached_token_factor is not a finite number"),
        (f'{KEY}tenant = "a"\nmodels = []', "keys[0].models is not a list of one or more names"),
        (f'{KEY}tenant = "a"\nmodels = "small"', "keys[0].models is not a list of one or more names"),
        (f'{KEY}tenant = "a"\nmodels = ["small", 1]', "keys[0].models is not a list of one or more names"),
        (f'{KEY}tenant = "a"\nexpires = 2030-01-31', "keys[0].expires is not a date and time with an offset"),
        (f'{KEY}tenant = "a"\nexpires = 2030-01-31T12:00:00', "keys[0].expires is not a date and time with an offset"),
        (f'{KEY}tenant = "a"\nexpires = "soon"', "keys[0].expires is not a date and time with an offset"),
        (f'{KEY}tenant = "a"\nexpires = 1896091200', "keys[0].expires is not a date and time with an offset"),
        (f'{KEY}tenant = "a"\n{OTHER}tenant = "a"\n{KEY}tenant = "b"', "keys[2] is the same key as keys[0]"),
        (
            f'{KEY}tenant = "a"\nmax_queued = 3\n{OTHER}tenant = "a"\nmax_running = 2\nmax_queued = 3',
            "keys[1].max_running differs from keys[0].max_running",
        ),
        (
            f'{KEY}tenant = "a"\nweight = 2\n{OTHER}tenant = "a"\nname = "b"',
            "keys[1].weight differs from keys[0].weight",
        ),
        ("[[keys", "keys.toml"),
    ],
    ids=range(45),
)
def test_the_error_of_a_bad_file_does_not_contain_its_keys(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidKeyFile) as error:
        read(tmp_path, text)
    assert message in str(error.value)
    assert "keys.toml" in str(error.value)
    assert "secret" not in str(error.value)


def test_a_key_of_the_least_length_is_taken(tmp_path: Path) -> None:
    key = "k" * MIN_KEY_LENGTH
    assert read(tmp_path, f'[[keys]]\nkey = "{key}"\ntenant = "a"')[0].digest == digest(key)


def test_a_missing_file_is_an_error() -> None:
    with pytest.raises(InvalidKeyFile, match="no-such-file"):
        read_key_file(Path("no-such-file"))


# Reloading.


def test_a_changed_file_is_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(f'{KEY}tenant = "a"')
    file = KeyFile(path)
    before = file.keys
    with caplog.at_level(logging.INFO, logger="quire.boundary"):
        file.refresh()
        assert file.keys is before
        assert caplog.records == []
        path.write_text(f'{KEY}tenant = "a"\n{OTHER}tenant = "b"')
        file.refresh()
    assert [key.tenant.name for key in file.keys] == ["a", "b"]
    (line,) = caplog.records
    assert (line.levelname, line.message) == ("INFO", "the file of API keys was read again")
    assert "secret" not in str(vars(line))


@pytest.mark.parametrize("text", [None, "", f"{KEY}tenant = 1", '[[keys]]\nkey = "secret"\ntenant = "a"'])
def test_a_file_that_cannot_be_used_changes_nothing(
    text: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(f'{KEY}tenant = "a"')
    file = KeyFile(path)
    before = file.keys
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    with caplog.at_level(logging.INFO, logger="quire.boundary"):
        for _ in range(3):
            file.refresh()
    assert file.keys is before
    (line,) = caplog.records  # once, not at each look
    assert line.levelname == "WARNING"
    assert "keys.toml" in line.why  # type: ignore[attr-defined]
    assert "secret" not in str(vars(line))
    path.write_text(f'{OTHER}tenant = "b"')
    file.refresh()
    assert [key.tenant.name for key in file.keys] == ["b"]


def test_a_mounted_secret_is_read_again(tmp_path: Path) -> None:
    """Kubernetes replaces a link to the directory of the files."""
    for version, tenant in (("first", "a"), ("second", "b")):
        (tmp_path / version).mkdir()
        (tmp_path / version / "keys.toml").write_text(f'{KEY}tenant = "{tenant}"')
    data = tmp_path / "..data"
    data.symlink_to("first")
    (tmp_path / "keys.toml").symlink_to("..data/keys.toml")
    file = KeyFile(tmp_path / "keys.toml")
    (tmp_path / "new").symlink_to("second")
    (tmp_path / "new").rename(data)
    file.refresh()
    assert [key.tenant.name for key in file.keys] == ["b"]
