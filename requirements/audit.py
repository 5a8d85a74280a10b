"""Looks up known vulnerabilities of all pinned packages with pip-audit.

Exits with 1 if a package has one, and with 2 if the index has no such data for a package: then nothing is known of it.
"""

import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
FILES = ("dev", "torch-cuda", "tools")


def report(answer: str, complaint: str) -> tuple[int, list[str]]:
    """The exit status and the lines to print, of pip-audit's output as JSON and of its standard error."""
    try:
        packages = json.loads(answer)["dependencies"]
    except (ValueError, KeyError):
        reason = complaint.strip().splitlines()[-1:] or ["pip-audit printed nothing"]
        return 2, [f"audit: no package could be looked up: {reason[0]}"]
    unknown = [package["name"] for package in packages if "skip_reason" in package]
    lines = [
        f"{package['name']} {package['version']}: {flaw['id']}, fixed in {', '.join(flaw['fix_versions']) or 'none'}"
        for package in packages
        for flaw in package.get("vulns", ())
    ]
    status = 1 if lines else 0
    lines.append(f"audit: {len(packages) - len(unknown)} packages looked up, {len(lines)} known vulnerabilities")
    if unknown:
        status = status or 2
        lines.append(
            f"audit: the index has no data on vulnerabilities for {len(unknown)} packages: {', '.join(unknown)}"
        )
    return status, lines


def main() -> None:
    """Look up and report."""
    command: list[str | Path] = [Path(sys.executable).with_name("pip-audit"), "--format", "json", "--desc", "off"]
    command += ["--progress-spinner", "off", "--disable-pip", "--require-hashes"]
    for name in FILES:
        command += ["--requirement", HERE / f"{name}.txt"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    status, lines = report(done.stdout, done.stderr)
    print("\n".join(lines))
    raise SystemExit(status)


if __name__ == "__main__":
    main()
