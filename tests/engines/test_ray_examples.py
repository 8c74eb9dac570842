"""The Slurm script and the KubeRay manifest of examples/ray_cluster: run and read as far as one machine can."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from ray_machines import free_port, processes_of
from tiny import same

from consilience.experiments import runner
from consilience.experiments.config import config

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_cluster"
SRUN = """#!/bin/bash
# stands in for Slurm's: notes the step, and runs it here
echo "$@" >> "$STEPS"
while [[ $1 == --* ]]; do shift; done
if [ "$1 $2" = "hostname --ip-address" ]; then echo "127.0.0.2 ::1"; exit; fi
exec "$@"
"""
SCONTROL = """#!/bin/bash
[ "$*" = "show hostnames node[1-2]" ] && printf 'node1\\nnode2\\n'
"""


def test_the_slurm_script_is_sound_shell() -> None:
    script = EXAMPLE / "slurm.sh"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", script], check=True)
    bare = subprocess.run(["bash", script], capture_output=True, text=True, env={"PATH": os.environ["PATH"]})
    assert bare.returncode and "usage: sbatch slurm.sh CONFIG.toml" in bare.stderr
    outside = subprocess.run(["bash", script, "x"], capture_output=True, text=True, env={"PATH": os.environ["PATH"]})
    assert outside.returncode and "run this with sbatch" in outside.stderr


@pytest.mark.parametrize(("given", "declared"), [(None, None), ("2", "2"), ("h200:2", "2")])
def test_the_slurm_script_declares_the_gpus_of_a_task(given: str | None, declared: str | None, tmp_path: Path) -> None:
    steps = tmp_path / "steps"
    # the run itself, after which the script ends its steps, lasts until both raylets were started
    begun = f"""case "$*" in *consilience*) for _ in {{1..400}}; do
        [ "$(grep -c ' ray start ' {steps})" -lt 2 ] || break; sleep 0.05; done;; esac"""
    srun = f'echo "$@" >> {steps}; echo 127.0.0.1\n{begun}'
    for name, text in (("srun", srun), ("scontrol", "echo node1; echo node2")):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_CPUS_PER_TASK": "4", "SLURM_JOB_ID": "7"}
    gpus = {} if given is None else {"SLURM_GPUS_PER_TASK": given}
    subprocess.run(
        ["bash", str(EXAMPLE / "slurm.sh"), "x.toml"],
        check=True,
        capture_output=True,
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", **job, **gpus},
    )
    raylets = [line for line in steps.read_text(encoding="utf-8").splitlines() if " ray start " in line]
    found = [part for line in raylets for part in line.split() if part.startswith("--num-gpus")]
    assert len(raylets) == 2 and found == ([] if declared is None else [f"--num-gpus={declared}"] * 2)


def _programs(folder: Path) -> Path:
    """A folder with stand-ins for Slurm's commands, and this environment's own."""
    folder.mkdir()
    own = Path(sys.executable).parent
    for name, text in (
        ("srun", SRUN),
        ("scontrol", SCONTROL),
        ("consilience", f'#!/bin/bash\nexec {shlex.quote(sys.executable)} -m consilience "$@"\n'),
    ):
        (folder / name).write_text(text, encoding="utf-8")
        (folder / name).chmod(0o755)
    (folder / "ray").symlink_to(own / "ray")
    return folder


@pytest.mark.slow
def test_the_slurm_script_runs_a_cluster_and_continues_a_run(tmp_path: Path) -> None:
    """With stand-ins for srun and scontrol: two raylets, a run on both, its continuation, and nothing left over."""
    pytest.importorskip("ray")
    port = free_port()
    short = Path("/tmp") / f"slurm-{port}"  # paths of sockets must be short
    surroundings = {
        **os.environ,
        "RAY_USAGE_STATS_ENABLED": "0",
        "PATH": f"{_programs(tmp_path / 'bin')}:{os.environ['PATH']}",
        "PYTHONPATH": f"{EXAMPLE.parents[1]}:{os.environ.get('PYTHONPATH', '')}",
        "STEPS": str(tmp_path / "steps"),
        "RUNS": str(tmp_path / "runs"),
        "RAY_PORT": str(port),
        "RAY_TMPDIR": str(short),
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_CPUS_PER_TASK": "1",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NAME": "digits",
    }
    wanted = ["partition.clients=4", "model.hidden=[8]", "threads=1", "engine.device=cpu"]
    try:
        for rounds in (2, 3):
            script = ["bash", str(EXAMPLE / "slurm.sh"), str(EXAMPLE / "cluster.toml"), f"rounds={rounds}", *wanted]
            done = subprocess.run(script, capture_output=True, text=True, timeout=280, env=surroundings)
            assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
            assert "PANIC" not in done.stdout + done.stderr  # all machines could join
            assert not processes_of(short, wait=10), "processes of the cluster are left"
    finally:
        for pid in processes_of(short, wait=0):
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(short, ignore_errors=True)
    steps = (tmp_path / "steps").read_text(encoding="utf-8").splitlines()
    assert sum("--nodelist=node2 ray start --address=127.0.0.2" in step for step in steps) == 2
    assert (
        sum(" consilience run " in step for step in steps) == sum(" consilience resume " in step for step in steps) == 1
    )
    facts = json.loads((tmp_path / "runs" / "digits-7" / "run.json").read_text(encoding="utf-8"))
    assert facts["config"]["engine"]["workers"] == 2
    alone = ["engine=vectorised", "rounds=4", f"runs={tmp_path}", "name=alone"]
    here = runner.execute(config.load(EXAMPLE / "cluster.toml", [*wanted, *alone]))
    dropped = [f"engine.{name}=" for name in ("workers", "min_workers", "threads", "address")]
    last = runner.proceed(tmp_path / "runs" / "digits-7", ["engine=vectorised", "rounds=4", *dropped])
    assert same(here.values, last.values)


def test_the_manifest_describes_a_cluster_that_runs_need() -> None:
    yaml = pytest.importorskip("yaml")
    manifest: Any = yaml.safe_load((EXAMPLE / "kuberay.yaml").read_text(encoding="utf-8"))
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayCluster") and manifest["metadata"]["name"]
    spec = manifest["spec"]
    assert spec.keys() <= {
        "rayVersion",
        "enableInTreeAutoscaling",
        "autoscalerOptions",
        "headGroupSpec",
        "workerGroupSpecs",
    }
    assert spec["enableInTreeAutoscaling"] and spec["autoscalerOptions"].keys() <= {"version", "idleTimeoutSeconds"}
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    images = set()
    for group in groups:
        assert group["rayStartParams"].keys() <= _start_options() and all(
            isinstance(value, str) for value in group["rayStartParams"].values()
        )
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert {"name", "image", "resources"} <= container.keys() and pod["restartPolicy"] == "Never"
        assert container["resources"]["requests"] == container["resources"]["limits"]
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
        images.add(container["image"])
    assert len(images) == 1  # the same versions everywhere
    for group in spec["workerGroupSpecs"]:
        assert group.keys() == {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}
        assert 0 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        (container,) = group["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["cpu"] == group["rayStartParams"]["num-cpus"]
        # KubeRay puts the value into a shell command, which takes one pair of quotes off
        (given,) = shlex.split(group["rayStartParams"]["resources"])
        assert json.loads(given) == {"site_a": 1}
    dockerfile = (EXAMPLE / "Dockerfile").read_text(encoding="utf-8")
    assert f"rayproject/ray:{spec['rayVersion']}-" in dockerfile and f"ray[default]=={spec['rayVersion']}" in dockerfile
    pinned = (EXAMPLE.parents[1] / "constraints.txt").read_text(encoding="utf-8")
    assert f"ray=={spec['rayVersion']}\n" in pinned


def _start_options() -> set[str]:
    """The options of `ray start`."""
    pytest.importorskip("ray")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Ray's own modules are warned of
        from ray.scripts.scripts import start
    return {flag.removeprefix("--") for option in start.params for flag in option.opts}
