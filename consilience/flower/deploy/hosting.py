"""The client side of an app: makes the site that answers from Flower's context."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from consilience.core.settings import Invalid
from consilience.flower.audit.receipts import RECEIPTS
from consilience.flower.deploy.settings import DeployedConfig, load
from consilience.flower.deploy.sources import source_of
from consilience.flower.engine.client import Site, SiteClient

SHARED = ("dtype", "precision", "deterministic", "lane")  # engine settings that apply to every node


def folder_client(folder: Path | str) -> SiteClient:
    """The client of the app in this folder."""
    kept = os.environ.get(RECEIPTS, "")
    return SiteClient(
        open_site=lambda context, case: site_of(Path(folder), context, case),
        secure=lambda context, case: _config(Path(folder), case, tuple(settings_of(context.run_config))).build_terms(),
        receipts=Path(kept) if kept else None,
    )


def site_of(folder: Path, context: Any, case: str) -> Site:
    """The site that a node config describes: `clients`, `memory`, `device` and whatever federation.py reads.

    A process that answers several messages of a run (Flower's simulation, tests) opens its site once. A SuperNode
    starts a process for every message, also if `executor` forks it, and its site ends with the process.
    """
    node = tuple(sorted(context.node_config.items()))
    return _site(folder, case, tuple(settings_of(context.run_config)), node, context.run_id)


@functools.lru_cache(maxsize=4)
def _site(
    folder: Path, case: str, overrides: tuple[str, ...], node_config: tuple[tuple[str, Any], ...], run: int
) -> Site:
    """The site of one run (rows may have changed since the last)."""
    node, config = dict(node_config), _config(folder, case, overrides)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    source, hosts = source_of(folder, config), hosts_of(node, config.deploy.clients)
    settings: dict[str, Any] = {key: config.engine[key] for key in SHARED if key in config.engine}
    memory = node.get("memory")
    return Site(
        algorithm=config.build_algorithm(),
        task=source.task,
        federation=source.held(hosts, node),
        hosts=hosts,
        clients=config.deploy.clients,
        engine={**settings, "device": node.get("device", config.engine.get("device", "auto"))},
        memory=Path(str(memory)) if memory else None,
        kept=config.kept_memories,
        secure=config.build_terms(),
    )


@functools.lru_cache(maxsize=4)
def _config(folder: Path, case: str, overrides: tuple[str, ...]) -> DeployedConfig:
    return load(folder, case, overrides)


def settings_of(run_config: Mapping[str, Any]) -> list[str]:
    """The `key=value` overrides of a Flower run, which both sides see."""
    return str(run_config.get("settings", "")).split()


def hosts_of(node: Mapping[str, Any], clients: int) -> np.ndarray:
    """The clients at a node: `clients="0,3"`, or Flower's customary `partition-id=2`."""
    given = node.get("clients", node.get("partition-id"))
    if given is None:
        raise Invalid('this SuperNode does not say which client it is: start it with --node-config "clients=0"')
    try:
        hosts = sorted({int(part) for part in str(given).split(",")})
    except ValueError:
        raise Invalid(f"node config clients = {given!r} must be numbers, such as 0 or '0,3'") from None
    if not hosts or hosts[0] < 0 or hosts[-1] >= clients:
        raise Invalid(f"node config clients = {given!r} must be within 0..{clients - 1} (deploy.clients = {clients})")
    return np.array(hosts, dtype=np.int64)
