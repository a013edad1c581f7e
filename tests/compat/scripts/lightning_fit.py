"""LightningModule and Trainer.fit with strategy ddp: ashleve/lightning-hydra-template; Lightning-AI/pytorch-lightning, examples/pytorch/basics."""

import logging
import os

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, _):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def on_train_end(self):
        print("rank", self.global_rank, "steps", self.global_step, "world", self.trainer.world_size)


if __name__ == "__main__":
    lightning.seed_everything(1, verbose=False)
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy="ddp", logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=".",
    )  # fmt: skip
    trainer.fit(Model(), DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=4))
