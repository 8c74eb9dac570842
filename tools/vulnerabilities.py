"""Known vulnerabilities of the installed packages, by pip-audit; one that could not be looked up is never called safe.

`python tools/vulnerabilities.py PIP_AUDIT SITE_PACKAGES`: exit code 1 if any are known, 2 without the database.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

OWN = {"consilience"}  # in no database
HELP = (
    "The database of known vulnerabilities (pypi.org, or osv.dev with PIP_AUDIT_VULNERABILITY_SERVICE=osv) could not "
    "be asked, so nothing is known. Run `make audit` where it can be reached, or let HTTPS_PROXY name a proxy."
)


def read(found: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """(known vulnerabilities, packages that were not looked up) in pip-audit's JSON."""
    known, unknown = [], []
    for package in found["dependencies"]:
        name = package["name"]
        if "skip_reason" in package and name not in OWN:
            unknown.append(name)
        for one in package.get("vulns", ()):
            fixed = ", ".join(one.get("fix_versions", ())) or "none"
            known.append(f"{name} {package['version']}: {one['id']} (fixed in: {fixed})")
    return known, unknown


def main(program: str, packages: str) -> int:
    """Ask, and say what was found."""
    command = [program, "--path", packages, "--format", "json", "--progress-spinner", "off", "--timeout", "15"]
    ran = subprocess.run(command, capture_output=True, text=True)
    try:
        known, unknown = read(json.loads(ran.stdout))
    except (ValueError, KeyError):
        print((ran.stderr.strip().splitlines() or ["pip-audit said nothing"])[-1])
        print(HELP)
        return 2
    for line in known:
        print(f"VULNERABLE {line}: raise its pin in constraints.txt")
    if unknown:
        print(f"{len(unknown)} packages were not looked up: {', '.join(unknown[:5])} ...")
        print(HELP)
    if not known and not unknown:
        print("no known vulnerabilities")
    return 1 if known else 2 if unknown else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
