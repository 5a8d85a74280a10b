"""The table of a key file that has tokens of an issuer accepted."""

from dataclasses import replace
from pathlib import Path

import pytest

from gateway_svc.key_file import KeyFile, read_key_file
from gateway_svc.key_tables import InvalidKeyFile
from gateway_svc.tenant import AccountLimits, Tenant
from gateway_svc.web_tokens import TokenRules
from token_issuer import AUDIENCE, ISSUER, TokenIssuer

NOTHING = Tenant("", limits=AccountLimits(""), max_priority=0)
GOLD = replace(NOTHING, weight=2.0, limits=AccountLimits("", max_running=8))


@pytest.fixture(scope="module")
def issuer() -> TokenIssuer:
    return TokenIssuer()


TABLE = f"""
[jwt]
issuer = "{ISSUER}"
audience = "{AUDIENCE}"
jwks = "jwks.json"
"""


def test_the_table_states_the_mapping(tmp_path: Path, issuer: TokenIssuer) -> None:
    (tmp_path / "jwks.json").write_text(issuer.key_set())
    path = tmp_path / "keys.toml"
    path.write_text(TABLE)
    assert read_key_file(path).token_rules == TokenRules(
        ISSUER, AUDIENCE, str(tmp_path / "jwks.json"), "sub", None, {"": replace(NOTHING, limits=AccountLimits("/"))}
    )
    path.write_text(
        f"""{TABLE}
        tenant_claim = "tenant"
        profile_claim = "https://example.com/plan"
        max_running = 2
        [jwt.profiles.gold]
        weight = 3
        max_priority = 5
        models = ["large"]
        [[keys]]
        key = "secret-secret-secret"
        tenant = "a"
        """
    )
    file = KeyFile(path)
    assert [key.tenant.name for key in file.keys] == ["a"]
    assert file.verifier is not None
    assert file.verifier.tenant(issuer.token()) == Tenant("search", 1.0, AccountLimits("search/jwt:", 2), 0)
    token = issuer.token(None, None, **{"https://example.com/plan": "gold"})
    assert file.verifier.tenant(token) == Tenant(
        "search", 3.0, AccountLimits("search/jwt:gold"), 5, frozenset({"large"})
    )
    # Other rules keep the signing keys.
    before = file.verifier.signing_keys
    path.write_text(TABLE)
    file.refresh()
    assert file.verifier.signing_keys is before
    assert file.verifier.tenant(issuer.token(sub="chat")).name == "chat"
    assert list(file.keys) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("jwt = 1", "jwt is not a table"),
        ('[jwt]\naudience = "a"\njwks = "b"', "jwt.issuer is missing"),
        ('[jwt]\nissuer = "a"\njwks = "b"', "jwt.audience is missing"),
        ('[jwt]\nissuer = ""\naudience = "a"\njwks = "b"', "jwt.issuer is not a non-empty string"),
        ('[jwt]\nissuer = "a"\naudience = "b"', "jwt.jwks is missing"),
        (TABLE.replace("jwks.json", "http://example.com/jwks"), "jwt.jwks is neither a path nor an https:// URL"),
        (TABLE.replace("jwks.json", "ftp://localhost/jwks"), "jwt.jwks is neither a path nor an https:// URL"),
        (TABLE.replace("jwks.json", "https://[/jwks"), "jwt.jwks is neither a path nor an https:// URL"),
        (f"{TABLE}tenant_claim = 1", "jwt.tenant_claim is not a non-empty string"),
        (f'{TABLE}profile_claim = "plan"', "jwt.profiles requires profile_claim"),
        (
            f"{TABLE}[jwt.profiles.gold]\nweight = 2",
            "jwt.profiles requires profile_claim, and profile_claim requires profiles",
        ),
        (f'{TABLE}profile_claim = "p"\n[jwt.profiles.gold]\nweight = 0', "jwt.profiles.gold.weight is not above 0"),
        (f'{TABLE}profile_claim = "p"\n[jwt.profiles.gold]\ntenant = "a"', "gold has the unknown field tenant"),
        (f'{TABLE}profile_claim = "p"\n[jwt.profiles."a/b"]\nweight = 1', "jwt.profiles is not tables with names"),
        (f"{TABLE}max_running = 0", "jwt.max_running is not an integer from 1"),
        (f"{TABLE}algorithms = []", "jwt has the unknown field algorithms"),
        (f"{TABLE}[tokens]", "there is the unknown table tokens"),
        (TABLE.replace("jwks.json", "nowhere.json"), "nowhere.json: no such file"),
    ],
    ids=range(18),
)
def test_a_bad_table_is_refused_by_field(text: str, message: str, tmp_path: Path, issuer: TokenIssuer) -> None:
    (tmp_path / "jwks.json").write_text(issuer.key_set())
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(InvalidKeyFile) as error:
        KeyFile(path)
    assert message in str(error.value)
