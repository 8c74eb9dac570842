"""An ordinary Flower client: plain local SGD."""

import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch.utils.data import DataLoader, TensorDataset

from flower_bench import workload

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    client = int(context.node_config["partition-id"])
    model = workload.build()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    rows = TensorDataset(*workload.rows(context.run_config["folder"], client))
    optimiser = torch.optim.SGD(model.parameters(), lr=workload.LR)
    for _ in range(workload.EPOCHS):
        for x, y in DataLoader(rows, batch_size=workload.BATCH, shuffle=True):
            optimiser.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimiser.step()
    metrics = MetricRecord({"num-examples": len(rows), "partition-id": client})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)
