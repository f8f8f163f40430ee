"""Several policies in one trainer: LoRA adapters on one base, which take turns.

    base (frozen) ──  solver    adapter, AdamW, generator ── a `Trainer`     one adapter is active at a time
                  ──  critic    adapter, AdamW, generator ── a `Trainer`

    step     rows of solver ──► solver's updates        rows of critic ──► critic's updates        then one version more

A step's number is the version of all: solver@7 and critic@7 are what both were after the seventh step, so that one
number says how old an id is. A policy that had nothing to train on is the same in the next version.

    checkpoints/step-00000007/solver    checkpoints/step-00000007/critic    a trainer's checkpoint each (state.py)
                              copies.safetensors  policies.json             frozen copies; names, and SHA-256 of them
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file

from unbroken.counters import Counters, Event
from unbroken.errors import CheckpointError, InvalidInputError, WeightsError
from unbroken.rollout.policies import PoliciesConfig
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.training.config import Reference, TrainerConfig
from unbroken.training.metrics.stats import ProcessStats, StepStats
from unbroken.training.model.adapters import checksum_of, with_matrices
from unbroken.training.model.pretrained import AddFiles, ModelForm
from unbroken.training.model.row_scores import RowScores
from unbroken.training.objective.base import Objective
from unbroken.training.objective.policy_gradient import PolicyGradient
from unbroken.training.objective.samples import TRAINABLE, DropReason, TrajectoryRows
from unbroken.training.state import read_state
from unbroken.training.trainer import Trainer
from unbroken.types import Logprobs, TrainingSample
from unbroken.untrusted import MAX_FACTS_BYTES, read_json_file
from unbroken.weights.files import WeightFiles, describe_file, parse_files
from unbroken.weights.folders import atomic_folder, flush_to_disk
from unbroken.weights.sources import WeightStream

T = TypeVar("T")
STATE = "policies.json"
_COPIES = "copies.safetensors"


class PolicyTrainers(Trainer):
    """The trainers of several policies, as one trainer of the loop: each row goes to that of its own policy."""

    def __init__(
        self,
        model: Any,
        config: TrainerConfig,
        *,
        policies: PoliciesConfig,
        objective: Objective[Any] | None = None,
        policy_version: int = 0,
        accelerator: Accelerator | None = None,
        reference: Reference | None = None,
    ) -> None:
        """Take over a `peft.PeftModel` that has an adapter for each name; `config.lora_updates` is adapter.

        Raises:
            InvalidInputError: as `Trainer`; there are several processes; the objective is no policy gradient, whose
                units are of one trajectory; or a policy has the name of a part of the model.
        """
        accelerator = accelerator or Accelerator()
        if not isinstance(objective, PolicyGradient | None):
            raise InvalidInputError(f"the objective of several policies must be a PolicyGradient, got {objective}")
        policies.check_processes(accelerator.num_processes)
        _check_names(model, policies.names)
        self._model = model
        self._policies = policies
        self._trainers: dict[str, Trainer] = {}
        for name in policies.names:
            model.set_adapter(name)  # the adapter that is active is the one that a trainer finds to train
            self._trainers[name] = Trainer(
                model, config, objective=objective, accelerator=accelerator, reference=reference
            )
        # What is not of one policy is asked of the first one's trainer.
        first = self._trainers[policies.names[0]]
        self.objective, self.backend = first.objective, first.backend
        self._config, self._processes, self._recomputes = first._config, first._processes, first._recomputes
        self._num_steps = 0
        self.policy_version = policy_version
        self._copies: dict[str, dict[str, torch.Tensor]] = {}
        """Frozen adapters by NAME@VERSION, as engines get them. The first version is the base, and needs none."""
        self._made_version = 0
        """That of the last step, or of the checkpoint: later numbers are the same weights."""
        self._activate(policies.names[0])

    @property
    def names(self) -> tuple[str, ...]:
        """Those of the policies."""
        return self._policies.names

    def _activate(self, name: str) -> Trainer:
        """Let the model compute and be trained as one policy."""
        if self._model.active_adapters != [name]:
            self._model.set_adapter(name)
        trainer = self._trainers[name]
        trainer.policy_version = self.policy_version
        return trainer

    async def make_units(self, groups: Sequence[TrajectoryGroup], counters: Counters) -> list[Any]:
        """The units of each policy: what it said, compared with what it said in the siblings, by its own rewards."""
        silent = [each for group in groups for each in group.trajectories if not each.parts]
        for each in silent:  # it ended before anybody spoke
            reason = DropReason.NOTHING_SAMPLED if each.status in TRAINABLE else each.status
            counters.count(Event.DROPPED_ROW, reason)
        units: list[Any] = []
        for name, trainer in self._trainers.items():
            made = await trainer.make_units(self._take_parts(groups, name, counters), counters)
            units += [replace(unit, policy=name) for unit in made]
        return units

    def _take_parts(self, groups: Sequence[TrajectoryGroup], name: str, counters: Counters) -> list[TrajectoryGroup]:
        """What one policy said in each group, unless it spoke in too few of the siblings to be compared."""
        parts = [part for group in groups if (part := group.take_part(name)) is not None]
        least = self.objective.min_group_size
        num_small = sum(len(part.trajectories) for part in parts if len(part.trajectories) < least)
        counters.count(Event.DROPPED_ROW, DropReason.SMALL_GROUP, times=num_small)
        return [part for part in parts if len(part.trajectories) >= least]

    def step(
        self, units: Sequence[Any], *, supervised: Sequence[TrainingSample] | None = None, weight: float = 1.0
    ) -> StepStats:
        """Train each policy on its own units (`Trainer.step`), one after the other, and raise the version by one."""
        assert supervised is None, "a run of several policies has no supervised rows"
        started = time.perf_counter()
        seen: dict[str, ProcessStats] = {}
        for name in self._trainers:
            own = [unit for unit in units if isinstance(unit, TrajectoryRows) and unit.policy == name]
            if any(self.objective.get_rows(unit) for unit in own):
                seen[name] = self._activate(name).train_units(own)
        if not seen:
            raise InvalidInputError("a step needs at least one row to train of any policy, got none: skip such a step")
        self._end_step()
        self._made_version = self.policy_version
        self._keep_copies()
        seconds = time.perf_counter() - started
        each = {name: self._merge_stats([seen[name]], seconds) if name in seen else None for name in self._trainers}
        return replace(self._merge_stats(list(seen.values()), seconds), policies=each)

    def _keep_copies(self) -> None:
        """Copy each policy if its version is one whose copies speak, and forget those that do not any more.

        After a kill versions go on above the engine's, and those that were left out are the policy as it is now. Raises
        `CheckpointError` for an older copy that is not there.
        """
        wanted = [name for name in self._policies.list_adapters(self.policy_version) if name not in self._trainers]
        self._copies = {name: each for name, each in self._copies.items() if name in wanted}
        for copy in [name for name in wanted if name not in self._copies]:
            name, _, version = copy.partition("@")
            if int(version) < self._made_version:
                raise CheckpointError(
                    f"the frozen copy {copy} is gone: policies.copy_every and policies.num_copies must be those with "
                    f"which the run began, got {self._policies.copy_every} and {self._policies.num_copies}"
                )
            weights = self._activate(name).named_weights()
            self._copies[copy] = {key: tensor.detach().to("cpu", copy=True) for key, tensor in weights}

    def logprobs(self, samples: Sequence[TrainingSample]) -> list[Logprobs]:
        """As `Trainer.logprobs`, each row under its own policy, or under the frozen copy that sampled it."""
        return self._ask_each(samples, Trainer.logprobs)

    def score(self, samples: Sequence[TrainingSample]) -> list[RowScores]:
        """As `logprobs`, with the entropy and the rank of each sampled id."""
        return self._ask_each(samples, Trainer.score)

    def _ask_each(
        self, samples: Sequence[TrainingSample], ask: Callable[[Trainer, Sequence[TrainingSample]], list[T]]
    ) -> list[T]:
        """The answers about rows, in their order, each given by the policy of the row."""
        found: dict[int, T] = {}
        for policy in dict.fromkeys(sample.policy for sample in samples):
            places = [place for place, sample in enumerate(samples) if sample.policy == policy]
            with self._speak_as(policy) as trainer:
                found.update(zip(places, ask(trainer, [samples[place] for place in places]), strict=True))
        return [found[place] for place in range(len(samples))]

    @contextmanager
    def _speak_as(self, policy: str | None) -> Iterator[Trainer]:
        """The trainer of a policy, with the weights of the frozen copy if it is one, and of the base if it is none."""
        name, _, version = (policy or self._policies.names[0]).partition("@")
        with ExitStack() as stack:
            trainer = self._activate(name)
            if policy is None or version == "0":
                stack.enter_context(self._model.disable_adapter())
            elif version:
                stack.enter_context(with_matrices(self._model, self._copies[policy]))
            yield trainer

    @property
    def weights_checksum(self) -> str | None:
        """As `Trainer.weights_checksum`, of all policies and of the frozen copies that speak now."""
        sums = [self._activate(name).weights_checksum for name in self._trainers]
        known = [each for each in sums if each is not None]
        return (
            "-".join([*known, checksum_of(sorted(_flatten(self._copies).items()))]) if len(known) == len(sums) else None
        )

    def find_difference(self, folder: Path) -> str | None:
        """As `Trainer.find_difference`, of the first policy or frozen copy that differs."""
        names, copies = _read_copies(folder)
        if names != list(self._trainers):
            return f"names of policies are {names}, and here {list(self._trainers)}"
        for name in names:
            if (found := self._activate(name).find_difference(folder / name)) is not None:
                return f"{name}: {found}"
        own, theirs = _flatten(self._copies), _flatten(copies)
        if own.keys() != theirs.keys():
            return f"frozen copies are {sorted(copies)}, and here {sorted(self._copies)}"
        differ = next((name for name, tensor in own.items() if not torch.equal(tensor, theirs[name])), None)
        return None if differ is None else f"frozen copies have other bits in {differ}"

    def named_weights(self) -> WeightStream:
        """The adapters of all policies and copies, each matrix under the name of its policy (`weights.adapters`)."""
        self._keep_copies()
        specs = [
            replace(spec, name=f"{name}/{spec.name}")
            for name in self._trainers
            for spec in self._activate(name).named_weights().specs
        ]
        frozen = WeightStream.of(_flatten(self._copies).items())
        return WeightStream([*specs, *frozen.specs], self._read_weights(frozen))

    def _read_weights(self, frozen: WeightStream) -> Iterator[tuple[str, torch.Tensor]]:
        for name in self._trainers:
            yield from ((f"{name}/{key}", tensor) for key, tensor in self._activate(name).named_weights())
        yield from frozen

    def copy_state(self, *, extra: Mapping[str, Any] | None = None) -> Callable[[Path], None]:
        """As `Trainer.copy_state`: a checkpoint of each policy in a folder of its name, and the frozen copies."""
        writers = {name: self._activate(name).copy_state(extra=extra) for name in self._trainers}
        copies = _flatten(self._copies)

        def write(folder: Path) -> None:
            try:
                with atomic_folder(folder) as aside:
                    for name, write_one in writers.items():
                        write_one(aside / name)
                    _write_copies(aside, list(writers), copies)
            except OSError as error:
                raise CheckpointError(
                    f"checkpoint {folder} cannot be written: {error}. Nothing is left of it"
                ) from error

        return write

    @staticmethod
    def read_version(folder: Path) -> int:
        """The policy version of a checkpoint; raises `CheckpointError` if it is damaged, or of one policy."""
        names, _ = _read_copies(folder)
        return read_state(folder / names[0]).state.policy_version

    def load(self, folder: Path) -> Mapping[str, Any]:
        """As `Trainer.load`. Raises `CheckpointError` too if the checkpoint is of other policies."""
        names, copies = _read_copies(folder)
        if names != list(self._trainers):
            raise CheckpointError(f"{folder} is of the policies {names}, and this run has {list(self._trainers)}")
        extras = [self._activate(name).load(folder / name) for name in names]
        self.policy_version = self._made_version = self._trainers[names[0]].policy_version
        self._copies = copies
        return extras[0]

    def save_pretrained(
        self, folder: Path, *, form: ModelForm | None = None, add_files: AddFiles | None = None
    ) -> None:
        """As `Trainer.save_pretrained`, each policy into a folder of its name; all are there or none is."""
        with atomic_folder(folder) as aside:
            for name in self._trainers:
                self._activate(name).save_pretrained(aside / name, form=form, add_files=add_files)


def _check_names(model: Any, names: Sequence[str]) -> None:
    """Raise `InvalidInputError` for a policy with the name of a part of the model.

    PEFT finds the matrices of other adapters by a part of their names when it saves one: beside an adapter "q_proj",
    the file of every other has no matrices of q_proj.
    """
    parts = {part for name, _ in model.named_modules() for part in name.partition(".lora_")[0].split(".")}
    if taken := sorted(parts.intersection(names)):
        raise InvalidInputError(f"policies.names must not be names of parts of the model, got {taken}")


def _write_copies(folder: Path, names: Sequence[str], copies: Mapping[str, torch.Tensor]) -> None:
    """Write the copies, and last the file by which they are found and verified."""
    save_file(dict(copies), folder / _COPIES)
    files = [asdict(describe_file(folder / _COPIES))]
    (folder / STATE).write_text(json.dumps({"names": list(names), "files": files}, indent=1), "utf-8")
    for name in (_COPIES, STATE):
        flush_to_disk(folder / name)


def _flatten(copies: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The matrices of frozen copies, as updates and checkpoints name them."""
    return {f"{policy}/{name}": tensor for policy, copy in copies.items() for name, tensor in copy.items()}


def _read_copies(folder: Path) -> tuple[list[str], dict[str, dict[str, torch.Tensor]]]:
    """The names of a checkpoint's policies, and its frozen copies; `CheckpointError` if it is damaged or of one."""
    try:
        state = read_json_file(folder / STATE, max_bytes=MAX_FACTS_BYTES)
        WeightFiles(folder=folder, policy_version=0, files=parse_files(state["files"])).verify()
        copies: dict[str, dict[str, torch.Tensor]] = {}
        for full, tensor in load_file(folder / _COPIES).items():
            policy, _, name = full.rpartition("/")
            copies.setdefault(policy, {})[name] = tensor
        return list(state["names"]), copies
    except (OSError, ValueError, KeyError, TypeError, WeightsError) as error:
        raise CheckpointError(
            f"{folder} must hold a whole checkpoint of several policies: {type(error).__name__}: {error}"
        ) from error
