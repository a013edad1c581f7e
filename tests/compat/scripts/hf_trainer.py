"""Trainer, compute_metrics, save_model: huggingface/transformers, examples/pytorch/text-classification/run_glue.py."""

import numpy as np
import torch
from transformers import BertConfig, BertForSequenceClassification, PrinterCallback, Trainer, TrainingArguments


class Pairs(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        ids = torch.tensor([1, 2 + index % 2, 3])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": index % 2}


def compute_metrics(prediction):
    return {"seen": len(np.argmax(prediction.predictions, axis=1))}


def main():
    training_args = TrainingArguments(
        output_dir="out", per_device_train_batch_size=4, num_train_epochs=1, report_to=[], disable_tqdm=True, save_strategy="no"
    )
    config = BertConfig(
        vocab_size=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    trainer = Trainer(
        model=BertForSequenceClassification(config),
        args=training_args,
        train_dataset=Pairs(),
        eval_dataset=Pairs(),
        compute_metrics=compute_metrics,
    )
    trainer.remove_callback(PrinterCallback)  # it prints times
    trainer.train()
    metrics = trainer.evaluate()
    trainer.save_model()
    if trainer.is_world_process_zero():
        print(f"steps {trainer.state.global_step}, seen {metrics['eval_seen']}, world {training_args.world_size}")


if __name__ == "__main__":
    main()
