"""Train a laLTE hybrid with Transformers' Trainer, in one process or in several.

    python examples/train_with_trainer.py --out runs/trained
    torchrun --nproc-per-node 2 examples/train_with_trainer.py --out runs/trained           # DDP
    torchrun --nproc-per-node 2 examples/train_with_trainer.py --out runs/trained --fsdp    # FSDP2: sharded weights

The loss is the model's own and the sparsity penalty of laLTE (equation 7), whose weights λ follow what each head
retains. `foveate train` does the same, and generates tasks of retrieval, resumes to the same losses and ends a hold
when the model recalls; use this where your data, your logging or your cluster already stand on the Trainer.
"""

import argparse
from pathlib import Path

import torch
import transformers

from foveate.hybrids.models import HybridForCausalLM, make_config
from foveate.hybrids.training.sparsity import SparsityFeedback, SparsitySettings


class SparseTrainer(transformers.Trainer):
    """A Trainer whose loss has the penalty, and which updates λ once a step, however many micro-batches it has."""

    def __init__(self, *given, sparsity: SparsitySettings, **named):
        super().__init__(*given, **named)
        self.model_accepts_loss_kwargs = False  # the loss is a mean, to be divided by the number of micro-batches
        self.feedback = SparsityFeedback(sparsity)
        self.add_callback(_EndsStep(self.feedback))

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs, output_retention=True, use_cache=False)
        loss = outputs.loss
        if model.training:
            self.feedback.observe(outputs.retention)
            loss = loss + self.feedback.penalty(outputs.retention)
        return (loss, outputs) if return_outputs else loss


class _EndsStep(transformers.TrainerCallback):
    def __init__(self, feedback: SparsityFeedback):
        self.feedback = feedback

    def on_optimizer_step(self, args, state, control, **_):
        self.feedback.step()  # the same λ on every rank: counts are averaged over the ranks

    def on_log(self, args, state, control, logs=None, **_):
        if logs is not None and "loss" in logs:
            logs |= {name: value for name, value in self.feedback.summary().items() if name != "retained"}


def rows(text: Path, length: int, vocabulary: int) -> list[dict[str, torch.Tensor]]:
    """Bytes of a text in rows of one length; yours would be tokens of a dataset."""
    ids = torch.tensor(list(text.read_bytes())) % vocabulary
    return [{"input_ids": row, "labels": row} for row in ids[: len(ids) // length * length].unflatten(0, (-1, length))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--text", type=Path, default=Path(__file__).parent / "data" / "books" / "moby_dick.txt")
    parser.add_argument("--size", default="tiny", help="of make_config: tiny, 27M, 60M, 0.4B, 1.4B")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches of two rows in a step, each process")
    parser.add_argument("--fsdp", action="store_true", help="shard weights, gradients and moments over the processes")
    given = parser.parse_args()

    transformers.set_seed(0)  # the same weights in every process
    model = HybridForCausalLM(make_config("lalte", given.size))
    how = {"fsdp": True, "fsdp_config": {"version": 2}} if given.fsdp else {}
    arguments = transformers.TrainingArguments(
        given.out,
        max_steps=given.steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=given.accumulate,
        learning_rate=1e-3,
        logging_steps=2,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
        use_cpu=not torch.cuda.is_available(),
        **how,
    )
    trainer = SparseTrainer(
        model,
        arguments,
        train_dataset=rows(given.text, 256, model.config.vocab_size),
        sparsity=SparsitySettings(budget=16, interval=2, start=1e-4, up=2.0),
    )
    trainer.train()
    trainer.save_model(given.out)
    if trainer.is_world_process_zero():
        print(f"{given.steps} steps; λ {trainer.feedback.summary()['lambda_mean']:.1e}; the model is in {given.out}")


if __name__ == "__main__":
    main()
