"""The names of the package `quire_client`."""

import os
import subprocess
import sys
from pathlib import Path

import quire_client


def test_each_name_can_be_imported_and_is_listed() -> None:
    for name in quire_client.__all__:
        assert getattr(quire_client, name) is not None
    assert set(quire_client.__all__) <= set(dir(quire_client))
    assert not hasattr(quire_client, "Klient")


def test_a_type_checker_finds_names_that_do_not_exist() -> None:
    program = "import quire_client; quire_client.Client; quire_client.Klient"
    command = [sys.executable, "-m", "mypy", "--config-file=", "--follow-imports=silent", "-c", program]
    environment = os.environ | {"MYPYPATH": str(Path(quire_client.__file__).parents[1])}
    printed = subprocess.run(command, capture_output=True, text=True, check=False, env=environment).stdout
    assert "Klient" in printed
    assert printed.count("error:") == 1


def test_importing_the_package_does_not_import_grpc() -> None:
    seen = "print('grpc' in sys.modules)"
    program = f"import sys, quire_client; {seen}; quire_client.errors.QuireError; quire_client.Client; {seen}"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed.split() == ["False", "True"]
