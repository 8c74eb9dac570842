"""An ordinary Flower ClientApp: independent of consilience."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from one_import import task

app = ClientApp()


def rows(context: Context):
    return task.load(int(context.node_config["partition-id"]), int(context.node_config["num-partitions"]))


@app.train()
def train(message: Message, context: Context) -> Message:
    model = task.build()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    mine, _ = rows(context)
    loss = task.train(model, mine, int(context.run_config["local-epochs"]), float(context.run_config["learning-rate"]))
    metrics = MetricRecord({"train-loss": loss, "num-examples": len(mine)})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    model = task.build()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    _, mine = rows(context)
    loss, accuracy = task.test(model, mine)
    metrics = MetricRecord({"loss": loss, "accuracy": accuracy, "num-examples": len(mine)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
