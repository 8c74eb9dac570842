"""An ordinary Flower ServerApp, but for one import."""

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from consilience.flower import SimProx as FedAvg  # was: from flwr.serverapp.strategy import FedAvg
from one_import import task

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=1.0)
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(task.build().state_dict()),
        num_rounds=int(context.run_config["num-server-rounds"]),
    )
