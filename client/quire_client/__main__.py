"""`python -m quire_client` is `quire`."""

from quire_client.cli import main

main()
