"""The names of the package `quire_client`."""

import subprocess
import sys

import quire_client


def test_each_name_can_be_imported_and_is_listed() -> None:
    for name in quire_client.__all__:
        assert getattr(quire_client, name) is not None
    assert set(quire_client.__all__) <= set(dir(quire_client))
    assert not hasattr(quire_client, "Klient")


def test_importing_the_package_does_not_import_grpc() -> None:
    seen = "print('grpc' in sys.modules)"
    program = f"import sys, quire_client; {seen}; quire_client.errors.QuireError; quire_client.Client; {seen}"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed.split() == ["False", "True"]
