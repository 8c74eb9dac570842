"""FedAvg, Flower's or consilience's; the clock is read before the first and after every round."""

import importlib

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from flower_bench import workload

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    folder = str(config["folder"])
    strategy = importlib.import_module(str(config["strategy"])).FedAvg(
        fraction_train=workload.COHORT / workload.CLIENTS,
        fraction_evaluate=0.0,
        min_train_nodes=workload.COHORT,
        min_available_nodes=workload.CLIENTS,
    )
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(workload.build().state_dict()),
        num_rounds=int(config["rounds"]),
        evaluate_fn=lambda number, arrays: workload.stamp(folder),
    )
