"""What runs inside vLLM's worker processes: `VllmEngine` names this class as their extension and calls it by RPC."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from unbroken.engines.vllm.scoring import patch_prompt_logprobs
from unbroken.engines.vllm.weights.communicator import Communicator
from unbroken.engines.vllm.weights.reloading import is_loaded_in_place, pack_heads_again
from unbroken.errors import WeightsError
from unbroken.transfer.announcement import Announcement, Transport
from unbroken.transfer.layout import ALIGNMENT, Layout, TensorSpec
from unbroken.transfer.memory import opened
from unbroken.transfer.receiver import Receiver

EXTENSION = "unbroken.engines.vllm.weights.workers.WorkerExtension"

Tied = Sequence[str] | None
"""Names of the output head and the embedding that it shares."""


class WorkerExtension:
    """Mixed into vLLM's worker class."""

    model_runner: Any
    vllm_config: Any
    device: Any
    reload_weights: Callable[..., None]
    _weight_receiver: Receiver | None = None
    _communicator: Communicator | None = None
    _parameters: dict[str, torch.Tensor]
    _row: Iterator[tuple[str, torch.Tensor]] | None = None

    def score_at_temperature(self) -> None:
        """Make prompt logprobs those of their request's temperature; once."""
        patch_prompt_logprobs(self.model_runner)

    def load_weight_files(self, folder: str, names: Mapping[str, str], tied: Tied) -> None:
        """Load the safetensors files in `folder`, which hold all weights; `names` are their checkpoint's, if others."""
        self._load(((names.get(name, name), tensor) for name, tensor in _read(Path(folder))), tied)

    def receive_weights(self, told: Mapping[str, Any], names: Sequence[str], tied: Tied) -> dict[str, str]:
        """Receive what is announced, and keep it: `digest`, or `error` with what went wrong.

        It never raises: a worker's exception would reach the engine before the answers of the others, which it would
        take for those to its next call.
        """
        try:
            announcement = Announcement.from_object(told)
            if self._weight_receiver is None:
                self._weight_receiver = Receiver(self.device)
            digest = self._weight_receiver.receive(
                announcement,
                rank=announcement.meeting.first_rank + self._rank_of_engine(),
                verify=lambda weights: _check_tied(dict(zip(names, weights.values(), strict=True)), tied),
            )
            return {"digest": digest}
        except Exception as error:
            return {"error": str(error) if isinstance(error, WeightsError) else f"{type(error).__name__}: {error}"}

    def load_received(self, names: Sequence[str], tied: Tied) -> None:
        """Load what `receive_weights` keeps; it is gone then."""
        assert self._weight_receiver is not None
        tensors = (tensor for _, tensor in self._weight_receiver.tensors())
        try:
            self._load(zip(names, tensors, strict=True), tied)
        finally:
            self._weight_receiver.drop()

    def device_uuid(self) -> str:
        """Which GPU this worker has; empty on a CPU."""
        return str(torch.cuda.get_device_properties(self.device).uuid) if self.device.type == "cuda" else ""

    def open_communicator(self, host: str, port: int, world_size: int, transport: str) -> dict[str, str]:
        """Meet a sender of parameters: nothing, or `error`. Like `receive_weights` it never raises."""
        return _told(lambda: self._meet(host, port, world_size, transport))

    def receive_parameter(self, name: str, dtype: str, shape: Sequence[int]) -> dict[str, str]:
        """Receive one parameter, and keep it: nothing, or `error`."""
        return _told(lambda: self._take(TensorSpec(name=name, dtype=dtype, shape=tuple(shape))))

    def check_parameters(self, names: Sequence[str], tied: Tied) -> dict[str, str]:
        """Whether all of them have come, under their checkpoint's names in order: nothing, or `error`."""
        return _told(lambda: _check_tied(dict(zip(names, self._parameters.values(), strict=True)), tied))

    def load_parameters(self, names: Sequence[str], tied: Tied) -> None:
        """Load what `receive_parameter` has kept; it is gone then."""
        parameters, self._parameters = self._parameters, {}
        self._load(zip(names, parameters.values(), strict=True), tied)

    def close_communicator(self) -> dict[str, str]:
        """Leave the sender, and drop what is not loaded."""
        self._communicator, self._parameters = None, {}
        return {}

    def _meet(self, host: str, port: int, world_size: int, transport: str) -> None:
        self._parameters = {}
        self._communicator = Communicator(
            host=host, port=port, rank=self._rank_of_engine(), world_size=world_size, device=self.device,
            transport=Transport(transport),
        )  # fmt: skip

    def _take(self, spec: TensorSpec) -> None:
        assert self._communicator is not None
        self._parameters[spec.name] = self._communicator.receive(spec)

    def weight_dtypes(self) -> list[str]:
        """The floating-point dtypes of the model's weights."""
        found = {weight.dtype for weight in self.model_runner.get_model().parameters() if weight.is_floating_point()}
        return sorted(str(dtype).removeprefix("torch.") for dtype in found)

    def open_row(self, handles: Sequence[Sequence[Any]], specs: Sequence[Sequence[Any]]) -> dict[str, str]:
        """Open the row of weights for which each worker has a handle: nothing, or `error`."""
        return _told(lambda: self._open(handles[self._rank_of_engine()], specs))

    def load_row(self) -> None:
        """Load what `open_row` has opened, and close it."""
        assert self._row is not None
        row, self._row = self._row, None
        self._load(row, None)

    def drop_weights(self) -> None:
        """Forget what `receive_weights` and `open_row` keep."""
        self._row = None
        if self._weight_receiver is not None:
            self._weight_receiver.drop()

    def _open(self, handle: Sequence[Any], specs: Sequence[Sequence[Any]]) -> None:
        tensors = tuple(TensorSpec(name=name, dtype=dtype, shape=tuple(shape)) for name, dtype, shape in specs)
        self._row = opened(handle, Layout(specs=tensors, bucket_bytes=ALIGNMENT))

    def _load(self, weights: Iterable[tuple[str, torch.Tensor]], tied: Tied) -> None:
        head = None if tied is None else tied[0]
        kept = (pair for pair in weights if pair[0] != head)
        if is_loaded_in_place(self.model_runner.get_model(), self.vllm_config):
            self.model_runner.get_model().load_weights(kept)
            self.model_runner.reset_encoder_cache()
            self.model_runner.reset_mm_cache()
        else:
            self.reload_weights(weights_iterator=kept)
            pack_heads_again(self.model_runner.get_model())
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # what fails there fails now, and what has loaded is acknowledged

    def _rank_of_engine(self) -> int:
        """The worker's number among all of its engine's, whose data-parallel copies come one after the other."""
        parallel = self.vllm_config.parallel_config
        rank: int = parallel.data_parallel_index * parallel.world_size + parallel.rank
        return rank


def _told(work: Callable[[], None]) -> dict[str, str]:
    """An error as an answer."""
    try:
        work()
        return {}
    except Exception as error:
        return {"error": str(error) if isinstance(error, WeightsError) else f"{type(error).__name__}: {error}"}


def _read(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # the reader is no dict
                yield name, file.get_tensor(name)


def _check_tied(weights: Mapping[str, torch.Tensor], tied: Tied) -> None:
    if tied is None:
        return
    head, embedding = tied
    if head in weights and not torch.equal(weights[head], weights[embedding]):
        raise WeightsError(f"weights {head!r} and {embedding!r} are tied in the model, but their values differ")
