"""Real processes: a registered node says it is client 0, and the true client 0 takes part all the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from local_deployments import rows, until, write_app

from consilience.flower.deploy import keys
from consilience.flower.deploy.local_deployment import LocalDeployment
from consilience.flower.deploy.up import facts_of

pytest.importorskip("flwr", reason='Flower is not installed: pip install "consilience[flower]"')
pytestmark = pytest.mark.slow


def test_a_false_claim_with_a_registered_key_is_refused_alone(tmp_path: Path) -> None:
    app = write_app(tmp_path / "app")
    with LocalDeployment(app, shares=[[0], [1]], place=tmp_path / "local") as stage:
        liar = keys.node_key(tmp_path / "liar")
        assert stage.register(Path(f"{liar}.pub")).wait(60) == 0
        stage.start_node(0, key=liar)  # it holds client 0, as it says
        process = stage.run(runs=str(tmp_path / "runs"))
        folder = tmp_path / "runs" / "real"
        until(lambda: process.code is not None, 240)
        assert facts_of(folder)["status"] == "finished"
        assert all(row["cohort"] == [0, 1] for row in rows(folder))
        assert "its key is not in the list of members" in (folder / "deploy.log").read_text()
