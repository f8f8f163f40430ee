"""The models that a run keeps in addition to its checkpoints.

OUTPUT/final/                   after the last step
OUTPUT/best/                    of the best evaluation (`evaluation.every`)
OUTPUT/best-candidate/          while it is evaluated during training
OUTPUT/models/step-00000100/    every N steps (`export.every`)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from unbroken.progress import begin
from unbroken.runs.config import ExportConfig
from unbroken.runs.export.files import ModelInfo, add_files, read_info, upload
from unbroken.training.model.pretrained import ModelForm
from unbroken.training.policies import PolicyTrainers
from unbroken.training.trainer import Trainer
from unbroken.weights.folders import flush_to_disk, remove_folder, remove_unfinished

FINAL, BEST, MODELS = "final", "best", "models"
CANDIDATE = "best-candidate"


def make_form(*, merged: bool, dtype: str | None, shard_gb: float = 5.0) -> ModelForm:
    """Make the form of a model from settings."""
    return ModelForm(
        merged=merged, dtype=None if dtype is None else getattr(torch, dtype), max_shard_bytes=int(shard_gb * 10**9)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptModels:
    """Writes the models of one run. Every process calls the methods together, and the first one writes.

    All methods block, and raise as `Trainer.save_pretrained` does. A model that is there already is not written again.
    """

    config: ExportConfig
    trainer: Trainer
    source: str
    """The model that is trained: an absolute path, or a hub name."""
    output: Path

    def remove_unfinished(self) -> None:
        """Remove what a killed process left; in the first process only."""
        remove_unfinished(self.output, FINAL)
        remove_unfinished(self.output, BEST)
        if (self.output / CANDIDATE).exists():
            remove_folder(self.output / CANDIDATE)
        remove_unfinished(self.output / MODELS, "step-")

    def write_final(self, step: int) -> Path:
        """Write the model after the last step."""
        return self._write(self.output / FINAL, step)

    def upload_final(self, model: Path, num_steps: int) -> None:
        """Upload the final model if the config says where to, and say so, in the first process. The others do not wait:
        it may take longer than they would.
        """
        if self.config.push_to_hub is not None and self.trainer.is_main_process:
            address = upload(model, self.config.push_to_hub, message=f"{num_steps} steps of training")
            print(f"model at {address}")

    def write_step(self, step: int) -> None:
        """Write the model after a step, if it is one of every `config.every`; keep the newest `config.num_kept`."""
        if self.config.every == 0 or step % self.config.every:
            return
        self._write(self.output / MODELS / f"step-{step:08}", step)
        with self.trainer.fail_together():
            if self.trainer.is_main_process and self.config.num_kept is not None:
                for folder in sorted((self.output / MODELS).glob("step-*"))[: -self.config.num_kept]:
                    remove_folder(folder)

    def write_best(self, step: int, evaluation: Mapping[str, float], *, by: str) -> None:
        """Write the model if its evaluation is better than that of the best one so far, by the number named `by`."""
        if self._is_best(evaluation, by):
            self._write(self.output / BEST, step, evaluation=evaluation)

    def write_candidate(self, step: int) -> None:
        """Write the model whose evaluation begins now, while training continues."""
        self._write(self.output / CANDIDATE, step)

    def settle_candidate(self, evaluation: Mapping[str, float], *, by: str) -> None:
        """The candidate is evaluated: it becomes the best model, or is removed."""
        is_best = self._is_best(evaluation, by)
        candidate = self.output / CANDIDATE
        with self.trainer.fail_together():
            info = self._read_info(candidate) if self.trainer.is_main_process else None
            if info is not None and is_best:
                add_files(candidate, replace(info, evaluation=dict(evaluation)))
                _move_folder(candidate, self.output / BEST)
        self.remove_candidate()

    def remove_candidate(self) -> None:
        """Remove a candidate whose evaluation did not end."""
        with self.trainer.fail_together():
            if self.trainer.is_main_process and (self.output / CANDIDATE).exists():
                remove_folder(self.output / CANDIDATE)

    def _is_best(self, evaluation: Mapping[str, float], by: str) -> bool:
        before = self.trainer.from_main_process(self._read_info(self.output / BEST))
        return before is None or before.evaluation is None or evaluation[by] > before.evaluation.get(by, -torch.inf)

    def _read_info(self, folder: Path) -> ModelInfo | None:
        """What is known of a model that is there; of several policies, each in its own folder, all have the same."""
        return read_info(folder / self.trainer.names[0] if isinstance(self.trainer, PolicyTrainers) else folder)

    def _write(self, folder: Path, step: int, *, evaluation: Mapping[str, float] | None = None) -> Path:
        config = self.config
        info = ModelInfo(
            step=step,
            source=self.source,
            merged=config.merged,
            dtype=config.dtype and config.dtype.value,
            evaluation=None if evaluation is None else dict(evaluation),
        )
        if self.trainer.from_main_process(self._read_info(folder)) != info:
            begin(f"writing the model into {folder}")
            form = make_form(merged=config.merged, dtype=info.dtype)
            self.trainer.save_pretrained(folder, form=form, add_files=partial(add_files, info=info))
        return folder


def _move_folder(folder: Path, target: Path) -> None:
    """Give a folder another name; a folder that has it is replaced."""
    if target.exists():
        remove_folder(target)
    folder.rename(target)
    flush_to_disk(target.parent)
