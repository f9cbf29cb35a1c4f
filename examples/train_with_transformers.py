"""A class head under the Trainer of transformers: a schedule, clipping, checkpoints with their rows, resumption.

pip install 'geartrain[examples]'
Run it: python examples/train_with_transformers.py
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments, get_cosine_schedule_with_warmup

import geartrain as gt
from geartrain.ams.client.cluster import Cluster

NUM_CLASSES, SAMPLES, BATCH, STEPS = 500, 4_000, 200, 80


class Classifier(nn.Module):
    """A backbone and a head. The Trainer asks for a dictionary with the loss."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 64))
        self.head = gt.ClassHead(cluster, "classes", num_classes=NUM_CLASSES, dim=64)
        self.losses: list[float] = []
        self.register_state_dict_post_hook(leave_head_out)
        self.register_load_state_dict_pre_hook(keep_head)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = self.head(self.backbone(inputs), labels)
        self.losses.append(loss.item())
        return {"loss": loss}


def leave_head_out(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Leave out the head's state, since the Trainer's files hold only tensors; it is saved with the rows."""
    del state[f"{prefix}head._extra_state"]


def keep_head(module: "Classifier", state: dict[str, Any], prefix: str, *others: Any) -> None:
    """Give the head's own state in place of the one that the Trainer's files lack."""
    state[f"{prefix}head._extra_state"] = module.head.get_extra_state()


class RowCheckpoints(TrainerCallback):
    """Saves the rows in each of the Trainer's checkpoints, loads them when it resumes, and clips them."""

    def __init__(self, head: gt.ClassHead, optimizer: Any, max_norm: float) -> None:
        self.head, self.optimizer, self.max_norm = head, optimizer, max_norm

    def rows_of(self, args: TrainingArguments, state: Any) -> Path:
        return Path(args.output_dir, f"checkpoint-{state.global_step}", "rows")

    def on_save(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        gt.save(self.head, self.rows_of(args, state))

    def on_train_begin(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step > 0:
            gt.load(self.head, self.rows_of(args, state), replace=True)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: Any, control: Any, model: Any, **kwargs: Any
    ) -> None:
        gt.clip_grad_norm_(model.parameters(), self.optimizer, self.max_norm)  # exact wherever the rows are


class StopAt(TrainerCallback):
    """Stands for a crash at some step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = control.should_training_stop or state.global_step == self.step


class Samples(Dataset[dict[str, torch.Tensor]]):
    """Prototypes with noise."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.labels = torch.randint(NUM_CLASSES, (SAMPLES,), generator=generator)
        self.inputs = torch.randn(NUM_CLASSES, 32, generator=generator)[self.labels]
        self.inputs += 0.5 * torch.randn(SAMPLES, 32, generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"inputs": self.inputs[index], "labels": self.labels[index]}


def trained(folder: Path, stop_at: int, *, resume: bool = False) -> list[float]:
    """Losses up to a step of STEPS, from the last checkpoint in ``folder`` with ``resume``."""
    torch.manual_seed(1)
    with gt.local() as cluster:
        model = Classifier(cluster)
        dense = torch.optim.AdamW(model.backbone.parameters(), lr=0.01)
        optimizer = gt.joint(dense, model.head, row_lr=0.01)  # the line that adds Geartrain
        trainer = Trainer(
            model,
            TrainingArguments(
                str(folder),
                max_steps=STEPS,
                per_device_train_batch_size=BATCH,
                save_steps=STEPS // 2,
                logging_strategy="no",
                max_grad_norm=0,  # RowCheckpoints clips by the joint norm
                use_cpu=True,
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=Samples(),
            optimizers=(optimizer, get_cosine_schedule_with_warmup(optimizer, 10, STEPS)),
            callbacks=[RowCheckpoints(model.head, optimizer, max_norm=5.0), StopAt(stop_at)],
        )
        trainer.train(resume_from_checkpoint=resume)
    return model.losses


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        whole = trained(Path(folder, "whole"), STEPS)
        first = trained(Path(folder, "parts"), STEPS // 2)
        second = trained(Path(folder, "parts"), STEPS, resume=True)
    print(f"loss {whole[0]:.4f} -> {whole[-1]:.4f}, and {second[-1]:.4f} if it is resumed half-way")
    assert whole == first + second


if __name__ == "__main__":
    main()
