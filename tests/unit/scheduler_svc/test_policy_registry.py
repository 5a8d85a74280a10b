"""Policies by name: built-in ones, and those of packages that are installed, here as directories on sys.path."""

import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from core_bench import CoreBench, keys, prompt
from scheduler_svc.core.policy import FairPolicy
from scheduler_svc.policy_registry import UnknownPolicy, find_policy
from scheduler_svc.settings import SchedulerSettings
from svc_common.settings import read_settings

PAGE = Path(__file__).parents[3] / "docs" / "design" / "extending.md"

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs a package of one module, with entry points in the group quire.policies."""

    def install(distribution: str, module: str, source: str, **points: str) -> None:
        root = tmp_path / distribution
        info = root / f"{distribution}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        lines = [f"{name} = {target}" for name, target in points.items()]
        (info / "entry_points.txt").write_text("\n".join(["[quire.policies]", *lines, ""]))
        (root / f"{module}.py").write_text(source)
        monkeypatch.syspath_prepend(root)
        monkeypatch.delitem(sys.modules, module, raising=False)

    return install


@pytest.fixture
def documented(install: Install) -> str:
    """The package of the documentation, installed; the policy's name."""
    blocks = dict(re.findall(r"^```(python|toml)\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL))
    project = tomllib.loads(blocks["toml"])["project"]
    ((name, target),) = project["entry-points"]["quire.policies"].items()
    install(project["name"].replace("-", "_"), target.split(":")[0], blocks["python"], **{name: target})
    return str(name)


def refusal(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The stderr of the scheduler when it is started with this policy."""
    with pytest.raises(SystemExit) as end:
        read_settings(SchedulerSettings, ["--policy", name])
    assert end.value.code == 2
    return capsys.readouterr().err


def test_the_documented_policy_orders_the_queue(documented: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_POLICY", documented)
    limits = read_settings(SchedulerSettings, []).limits
    bench = CoreBench(limits=limits, max_sequences=1)
    assert limits.policy == documented
    bench.submit("long", prompt(9), 1)
    bench.submit("short", prompt(3, 100), 1)
    bench.submit("middle", prompt(6, 200), 1)
    assert [keys(bench.step()) for _ in range(3)] == [["short"], ["middle"], ["long"]]


def test_a_built_in_policy_comes_before_an_entry_point_of_its_name(install: Install) -> None:
    install("shadow", "shadow_policy", "raise AssertionError('imported')", fair="shadow_policy:Policy")
    assert find_policy("fair") is FairPolicy


def test_an_unknown_name_is_refused_with_those_that_are_known(
    documented: str, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refusal("lottery", capsys)
    assert "QUIRE_POLICY (--policy): there is no policy 'lottery'" in message
    assert message.endswith(f"known: fair, fcfs, priority, {documented}\n")


def test_a_name_that_two_packages_have_is_refused(install: Install) -> None:
    install("one", "policy_one", "class Policy: pass", lottery="policy_one:Policy")
    install("two", "policy_two", "class Policy: pass", lottery="policy_two:Policy")
    with pytest.raises(UnknownPolicy, match=r"several packages .* policy_one:Policy, policy_two:Policy"):
        find_policy("lottery")


WHOLE = """
class Policy:
    def __init__(self, settings): ...
    def __len__(self): ...
    def add(self, sequence, now): ...
    def remove(self, sequence): ...
    def first(self, now): ...
    def charge(self, sequence, num_tokens): ...
    def preemption_key(self, sequence): ...
    def effective_priority(self, sequence, now): ...
    def outranks(self, waiting, running, now): ...
    def debt(self, tenant, priority=None): ...
    def position(self, sequence, now): ...
"""


def test_a_class_that_has_every_method_is_taken(install: Install) -> None:
    install("whole", "whole_policy", WHOLE, lottery="whole_policy:Policy")
    assert find_policy("lottery").__module__ == "whole_policy"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("import no_such_module", "cannot be loaded: ModuleNotFoundError: No module named 'no_such_module'"),
        ("1 / 0", "cannot be loaded: ZeroDivisionError"),
        ("", "cannot be loaded: AttributeError"),
        ("Policy = 7", "is not a class"),
        (WHOLE.replace("(self, settings)", "(self)"), "does not take PolicySettings as its one argument"),
        (WHOLE.replace("def charge", "def charged").replace("def first", "def last"), "it has no first, no charge"),
        (WHOLE.replace("def __len__", "def len"), "it has no __len__"),
        (WHOLE.replace("charge(self, sequence, num_tokens)", "charge(self, sequence)"), "charge does not take"),
        ("Policy = type", "does not take PolicySettings as its one argument"),
        (WHOLE + "    charge = max", "charge does not take"),
        (
            WHOLE.replace("def __init__(self, settings): ...", "def __init__(self, settings): settings.weights"),
            "cannot be made: AttributeError: 'PolicySettings' object has no attribute 'weights'",
        ),
    ],
    ids=[
        *("import", "raises", "absent", "value", "settings", "methods", "length", "arguments"),
        *("class without a signature", "method without a signature", "fails"),
    ],
)
def test_what_is_no_policy_is_refused_by_its_setting(
    source: str, why: str, install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install("broken", "broken_policy", source, lottery="broken_policy:Policy")
    message = refusal("lottery", capsys)
    assert message.startswith("python -m scheduler_svc: QUIRE_POLICY (--policy): the policy 'lottery'")
    assert "entry point broken_policy:Policy of quire.policies" in message
    assert why in message
