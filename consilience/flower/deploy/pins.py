"""Which apps may run here: digests, the list of allowed ones, and the reason why a Flower task is refused.

A SuperLink sends apps to nodes, which run them. So every task is compared with a list of digests before anything of the
app is unpacked: SHA-256 of the bundle that Flower makes of the app's folder, and of the `settings` it is run with.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from consilience.core.settings import Invalid

SERVER, CLIENT = "server", "client"  # kind of tasks: ServerApps, or messages to ClientApps


class AppRefused(RuntimeError):
    """An app that is not on the list; nothing of it was run."""


def digest(app: Path, settings: Iterable[str] = ()) -> str:
    """The digest of an app's folder run with these settings (`key=value`), as in a list of allowed apps."""
    from flwr.cli.build import build_fab_from_disk

    if not (Path(app) / "pyproject.toml").is_file():
        raise Invalid(f"{app} is no Flower app: `consilience deploy init {app}` makes one")
    try:
        bundle = build_fab_from_disk(Path(app))
    except ValueError as problem:
        raise Invalid(f"{app} cannot be bundled: {problem}") from problem
    return agreed(hashlib.sha256(bundle).hexdigest(), " ".join(settings))


def agreed(bundle: str, settings: str) -> str:
    """The digest of a bundle with settings; without any it is the bundle's own, as Flower prints it."""
    words = settings.split()
    return hashlib.sha256("\n".join([bundle, *words]).encode()).hexdigest() if words else bundle


def write(file: Path, digests: Iterable[str]) -> Path:
    """The list of allowed apps: one digest a line."""
    wanted = list(dict.fromkeys(digests))
    for each in wanted:
        if not re.fullmatch("[0-9a-f]{64}", each):
            raise Invalid(f"{each!r} is no digest: write what `consilience deploy digest APP` prints")
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    file.write_text("".join(f"{each}\n" for each in wanted), encoding="utf-8")
    return file


def read(file: Path) -> frozenset[str]:
    """The allowed digests; without a file nothing is allowed."""
    return frozenset(file.read_text(encoding="utf-8").split()) if file.is_file() else frozenset()


def refusal(task: Any, role: str, allowed: frozenset[str]) -> str:
    """Why a task (Flower's PullTaskInputResponse) may not run here; empty if it may."""
    from flwr.cli.config_utils import get_fab_config, get_fab_metadata
    from flwr.common.serde import user_config_from_proto

    bundle = hashlib.sha256(task.fab.content).hexdigest()
    # A ServerApp's config is made of the run's overrides; a ClientApp's comes ready, and may be another run's.
    given = user_config_from_proto(task.run.override_config if role == SERVER else task.context.run_config)
    settings = str(given.get("settings", ""))
    found = agreed(bundle, settings)
    if found not in allowed and bundle in allowed:  # the app's own settings, in its pyproject.toml, are part of it
        own = get_fab_config(task.fab.content)["tool"]["flwr"]["app"].get("config", {}).get("settings", "")
        found = bundle if settings == str(own) else found
    if found not in allowed:
        said = f" with settings {settings!r}" if settings else ""
        return f"app {bundle}{said} is not allowed here: its digest {found} is none of the {len(allowed)} on the list"
    if task.fab.hash_str != bundle:  # Flower loads the folder that these three name
        return f"app {bundle} is announced as {task.fab.hash_str[:80]!r}"
    if (task.run.fab_id, task.run.fab_version) != get_fab_metadata(task.fab.content):
        return f"app {bundle} is announced as {task.run.fab_id[:80]!r} {task.run.fab_version[:80]!r}"
    return ""


def enforce(process: Any, role: str, allowed: frozenset[str]) -> None:
    """Make a process of Flower's (its module `run_clientapp` or `run_serverapp`) refuse what is not on the list.

    A refused app's bundle is emptied as soon as it arrives, so that there is nothing to run; installing says why.
    """
    from flwr.supercore.runtime import RuntimeHttpClient

    pull, install, problems = RuntimeHttpClient.PullTaskInput, process.install_from_fab, [""]

    def pull_checked(self: Any, request: Any) -> Any:
        task = pull(self, request)
        problems[0] = refusal(task, role, allowed)
        if problems[0]:
            task.fab.content = b""
        return task

    def install_checked(bundle: bytes, *rest: Any, **options: Any) -> Any:
        if problems[0]:
            raise AppRefused(problems[0])
        return install(bundle, *rest, **options)

    RuntimeHttpClient.PullTaskInput = pull_checked  # type: ignore[method-assign]
    process.install_from_fab = install_checked
