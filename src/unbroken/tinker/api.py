"""What the paths of the Tinker API do."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from pydantic import BaseModel

from unbroken.engines.checks import require_updatable
from unbroken.errors import InvalidInputError, TrainingError, UnbrokenError
from unbroken.server.context import ServerContext
from unbroken.server.http.errors import HttpError, to_http_error
from unbroken.threads import DaemonThreads
from unbroken.tinker.data import AdamParams, LoraSpec
from unbroken.tinker.options import TinkerOptions
from unbroken.tinker.provenance import ProvenanceCheck
from unbroken.tinker.sampling import CompletionsBody, SamplerWeights, WeightSwitch, sample, write_base
from unbroken.tinker.sessions import (
    FORGOTTEN,
    MAX_SNAPSHOTS,
    Promise,
    PromiseResult,
    Promises,
    TinkerSampler,
    TinkerSession,
    TinkerSessions,
    TrainingRun,
)
from unbroken.tinker.store import Checkpoint, ModelFacts, RecordedSequence, TinkerStore
from unbroken.tinker.wire import (
    PROTOBUF,
    ApiCallBody,
    encode_forward_backward,
    encode_sample,
    parse_forward_backward,
    read_data,
    read_loss_config,
)
from unbroken.transfer.files import write_tensors
from unbroken.transfer.sources import NamedTensors
from unbroken.weights.folders import atomic_folder, flush_to_disk

if TYPE_CHECKING:
    from unbroken.tinker.models import Models

T = TypeVar("T")
Answer: TypeAlias = Promise | PromiseResult | dict[str, Any] | None
_MAX_TTL_S = 10 * 365 * 86400
_POLL_S = 20.0
"""How long a result is waited for before the client asks again; the SDK gives an answer 45 s."""


class TinkerApi:
    """What the paths do, for the owner of a key: a hash of it."""

    def __init__(
        self,
        context: ServerContext,
        store: TinkerStore,
        options: TinkerOptions,
        *,
        model: str,
        tokenizer: str,
        open_backend: Callable[[], Models],
    ) -> None:
        """`model` and `tokenizer` are folders or hub names; the backend is opened with the first model."""
        self._context = context
        self._store = store
        self._options = options
        self._model = model
        self._tokenizer = str(Path(tokenizer).resolve()) if Path(tokenizer).is_dir() else tokenizer
        self._open_backend = open_backend
        self._backend: Models | None = None
        self._training, self._storing = DaemonThreads(1), DaemonThreads(1)
        self._engine = require_updatable(context.service.engine)
        self._base = SamplerWeights()
        self._switch = WeightSwitch(
            self._engine, make_base=lambda loaded: write_base(loaded, store.temporary_folder / "base", Path(model))
        )
        self.promises = Promises()
        self.sessions = TinkerSessions(idle_s=options.tinker_idle_s, end_session=self._free)

    @property
    def _base_model(self) -> str:
        return self._context.config.model_name

    async def _train(self, work: Callable[[Models], T]) -> T:
        """Run `work` in the thread that trains."""

        def call() -> T:
            if self._backend is None:
                self._backend = self._open_backend()
            return work(self._backend)

        return await self._training.run(call)

    async def describe_server(self, owner: str) -> Answer:
        model = {"model_name": self._base_model, "max_context_length": self._engine.context_length}
        return {"supported_models": [{**model, "trainable": True, "sampleable": True}]}

    # Sessions

    async def create_session(self, owner: str, body: ApiCallBody) -> Answer:
        session = TinkerSession(session_id=str(uuid.uuid4()), owner=owner)
        self.sessions.add(session)
        return {"type": "create_session", "session_id": session.session_id}

    async def note_heartbeat(self, owner: str, body: ApiCallBody) -> Answer:
        self.sessions.get(body.session_id, owner=owner, status=410)
        return {"type": "session_heartbeat"}

    async def finish_session(self, owner: str, session_id: str) -> Answer:
        """End a session, and free what it has."""
        await self.sessions.end(self.sessions.get(session_id, owner=owner), "its client has finished")
        return None

    async def _free(self, session: TinkerSession, reason: str) -> None:
        self.promises.cancel_samples(session.session_id)
        for run in session.runs.values():
            await run.end(reason)
            with suppress(UnbrokenError):  # it was never made
                await self._train(methodcaller("delete", run.model_id))
            await self._storing.run(partial(self._store.end_model, run.model_id, reason))
        folder = self._store.temporary_folder / session.session_id
        await self._storing.run(lambda: shutil.rmtree(folder, ignore_errors=True))

    # Models

    async def create_model(self, owner: str, body: ApiCallBody, checkpoint: Checkpoint | None = None) -> Answer:
        """Make a model, of the base model or of a checkpoint; the promise of before, if the call comes again."""
        session = self.sessions.get(body.session_id, owner=owner)
        if body.base_model is not None or checkpoint is None:
            self._check_base(body.base_model)
        model_id = f"{body.session_id}:train:{body.model_seq_id}"
        request_id, content = f"{model_id}:0", _encode(body)
        if known := self.promises.find_repeated(request_id, "create_model", content):
            return known
        number = self.sessions.count_runs(owner=owner)
        if number >= self._options.tinker_max_models:
            raise HttpError(
                400,
                f"this key trains {number} models, and may train {self._options.tinker_max_models} at a time "
                "(--tinker-max-models): close another client",
            )
        given = None if body.lora_config is None or body.lora_config.rank == 0 else body.lora_config.model_dump()
        lora = given if checkpoint is None else checkpoint.lora
        self._check_kind(lora)
        facts = ModelFacts(model_id=model_id, base_model=self._base_model, lora=lora, user_metadata=body.user_metadata)
        promise = self.promises.open(request_id, "create_model", content, owner=owner, model_id=model_id)
        run = TrainingRun(facts, owner=owner, promises=self.promises)
        session.runs[model_id] = run
        work = partial(self._create, session, run, checkpoint, body.optimizer)
        promise.task = asyncio.create_task(self.promises.run(promise, work))
        return promise

    async def _create(
        self, session: TinkerSession, run: TrainingRun, checkpoint: Checkpoint | None, optimizer: bool
    ) -> PromiseResult:
        lora = run.facts.lora
        try:
            config = None if lora is None else LoraSpec(**lora)
            made = await self._train(methodcaller("create", run.model_id, config))
            run.facts = replace(run.facts, lora=None if made is None else asdict(made))
            if checkpoint is not None:
                await self._load(run, checkpoint, optimizer)
        except BaseException:
            session.runs.pop(run.model_id, None)
            raise
        await self._storing.run(partial(self._store.put_model, run.facts, owner=run.owner))
        if checkpoint is None:
            return PromiseResult.of({"model_id": run.model_id, "type": "create_model"})
        return PromiseResult.of({"path": checkpoint.path, "model_id": run.model_id, "type": "load_weights"})

    def _check_base(self, name: str | None) -> None:
        if name not in (self._base_model, self._model):
            raise HttpError(400, f"base_model must be {self._base_model!r}, this server's model, got {name!r:.200}")

    def _check_kind(self, lora: Mapping[str, Any] | None) -> None:
        """Raise `HttpError` unless an adapter, or all weights with None, is what this server's models are."""
        if (lora is None) != self._options.tinker_full:
            ours, other = ("all weights (rank 0)", "without") if self._options.tinker_full else ("adapters", "with")
            raise HttpError(400, f"this server trains {ours} alone: start one {other} --tinker-full for the other kind")

    async def _get_run(self, model_id: str, owner: str) -> TrainingRun:
        run = self.sessions.find_run(model_id, owner=owner)
        if run is None:
            raise await self.explain_gone(model_id, owner)
        return run

    def refuse(self, owner: str, given: Mapping[str, Any], kind: str, error: Exception) -> Promise:
        """Fail a call of which only the number can be read, so that later ones go on; raise `error` if it has none."""
        model_id, seq_id = given.get("model_id"), given.get("seq_id")
        run = self.sessions.find_run(model_id, owner=owner) if isinstance(model_id, str) else None
        if run is None or type(seq_id) is not int:
            raise error

        async def fail() -> PromiseResult:
            raise to_http_error(error)

        return run.submit(seq_id, kind, fail, json.dumps(given).encode())

    async def explain_gone(self, model_id: str, owner: str) -> HttpError:
        """The error for a model that is not there: why, and how to go on."""
        found = await self._storing.run(partial(self._store.find_model, model_id, owner=owner))
        if found is None:
            return HttpError(404, f"this key has no model {model_id[:200]!r}")
        saved = await self._storing.run(partial(self._store.list_checkpoints, owner=owner, model_id=model_id))
        last = next((each for each in saved if each.is_for_training), None)
        advice = (
            "nothing of it was saved by save_state"
            if last is None
            else f"its last save_state is {last.path}: go on by create_training_client_from_state_with_optimizer"
        )
        return HttpError(410, f"model {model_id} is gone: {found.ended or 'its session has ended'}; {advice}")

    async def describe_model(self, owner: str, body: ApiCallBody) -> Answer:
        facts = (await self._get_run(body.model_id, owner)).facts
        return {
            "type": "get_info",
            "model_data": {"model_name": facts.base_model, "tokenizer_id": self._tokenizer},
            "model_id": body.model_id,
            "is_lora": facts.lora is not None,
            "lora_rank": None if facts.lora is None else facts.lora["rank"],
            "model_name": facts.base_model,
        }

    async def forward_backward(self, owner: str, body: bytes, content_type: str, encoding: str) -> Promise:
        """Compute the gradients of data, or the logprobs and the loss alone."""
        message = await asyncio.to_thread(parse_forward_backward, body, content_type, encoding)
        run = await self._get_run(message.model_id, owner)
        kind = "forward" if message.forward_only else "forward_backward"
        content = await asyncio.to_thread(message.SerializeToString, deterministic=True)
        return run.submit(message.seq_id, kind, partial(self._forward_backward, run, message), content)

    async def _forward_backward(self, run: TrainingRun, message: Any) -> PromiseResult:
        data = await asyncio.to_thread(read_data, message, self._engine.vocab_size, self._engine.context_length)
        policy, loss, config = self._options.tinker_provenance, message.loss_fn, read_loss_config(message)
        check = ProvenanceCheck(
            self._store, policy, owner=run.owner, model_id=run.model_id, version=run.version, loss=loss
        )
        checked, metrics = await self._storing.run(lambda: check.check(data))
        output = await self._train(
            lambda backend: backend.forward_backward(run.model_id, checked, loss, config, not message.forward_only)
        )
        return PromiseResult(body=encode_forward_backward(output, metrics), media_type=PROTOBUF)

    async def optim_step(self, owner: str, body: ApiCallBody) -> Answer:
        run = await self._get_run(body.model_id, owner)

        async def work() -> PromiseResult:
            metrics = await self._train(methodcaller("optim_step", run.model_id, read_adam(body.adam_params)))
            run.version += 1
            return PromiseResult.of({"metrics": dict(metrics)})

        return run.submit(body.seq_id, "optim_step", work, _encode(body))

    # Checkpoints

    async def save_weights(self, owner: str, body: ApiCallBody) -> Answer:
        """Save a model with its optimizer, so that training can go on from there."""
        run = await self._get_run(body.model_id, owner)

        async def work() -> PromiseResult:
            path = await self._save(run, "weights", body.path or f"{body.seq_id:06}", body)
            return PromiseResult.of({"path": path, "type": "save_weights"})

        return run.submit(body.seq_id, "save_weights", work, _encode(body))

    async def _save(self, run: TrainingRun, kind: str, name: str, body: ApiCallBody) -> str:
        """Save a model under a name, in a folder of its own; returns the path. One that is replaced is whole until the
        new one's row is written.
        """
        path = f"tinker://{run.model_id}/{kind}/{check_name(name)}"
        if body.ttl_seconds is not None and not 1 <= body.ttl_seconds <= _MAX_TTL_S:
            raise InvalidInputError(f"ttl_seconds must lie in [1, {_MAX_TTL_S}], got {body.ttl_seconds}")
        known = await self._storing.run(partial(self._store.find_checkpoint, path, owner=run.owner))
        if known is not None and not body.overwrite:
            raise InvalidInputError(f"{path} is there already: give another name, or to save_state overwrite=True")
        checkpoint = Checkpoint(
            path=path,
            folder=f"{name}-{uuid.uuid4().hex}",
            model_id=run.model_id,
            base_model=run.facts.base_model,
            lora=run.facts.lora,
            version=run.version,
            num_bytes=0,
            user_metadata=body.user_metadata,
            expires=None if body.ttl_seconds is None else time.time() + body.ttl_seconds,
        )
        folder, state = self._store.folder_of(checkpoint), checkpoint.is_for_training
        written = replace(checkpoint, num_bytes=await self._train(partial(_write, folder, run.model_id, state=state)))
        await self._storing.run(partial(self._store.put_checkpoint, written, owner=run.owner))
        return path

    async def _get_checkpoint(self, path: str, owner: str) -> Checkpoint:
        found = await self._storing.run(partial(self._store.find_checkpoint, path, owner=owner))
        if found is None:
            raise HttpError(404, f"this key has no checkpoint {path[:300]!r}")
        return found

    async def load_weights(self, owner: str, body: ApiCallBody) -> Answer:
        path = body.path or ""
        if not body.model_id:
            return await self.create_model(owner, body, await self._get_checkpoint(path, owner))
        run = await self._get_run(body.model_id, owner)

        async def work() -> PromiseResult:
            await self._load(run, await self._get_checkpoint(path, owner), body.optimizer)
            return PromiseResult.of({"path": path, "model_id": run.model_id, "type": "load_weights"})

        return run.submit(body.seq_id, "load_weights", work, _encode(body))

    async def _load(self, run: TrainingRun, checkpoint: Checkpoint, optimizer: bool) -> None:
        if not checkpoint.is_for_training:
            raise InvalidInputError(f"{checkpoint.path} is for sampling alone: load what save_state saved")
        folder = self._store.folder_of(checkpoint) / "state"
        await self._train(methodcaller("load", run.model_id, folder, optimizer))
        run.version += 1

    async def save_weights_for_sampler(self, owner: str, body: ApiCallBody) -> Answer:
        """Save the weights for sampling: under a name, or for a sampler that is made of them."""
        run = await self._get_run(body.model_id, owner)

        async def work() -> PromiseResult:
            kind = "save_weights_for_sampler"
            if body.path is not None:
                path = await self._save(run, "sampler_weights", body.path, body)
                return PromiseResult.of({"path": path, "type": kind})
            sampler = await self._make_sampler(run, body)
            return PromiseResult.of({"sampling_session_id": sampler.sampler_id, "type": kind})

        return run.submit(body.seq_id, "save_weights_for_sampler", work, _encode(body))

    async def _make_sampler(self, run: TrainingRun, body: ApiCallBody) -> TinkerSampler:
        if body.sampling_session_seq_id is None:
            raise InvalidInputError("save_weights_for_sampler needs path or sampling_session_seq_id, got neither")
        session = self.sessions.get(run.session_id, owner=run.owner)
        if f"{session.session_id}:sample:{body.sampling_session_seq_id}" in session.samplers:
            raise InvalidInputError(f"sampling_session_seq_id {body.sampling_session_seq_id} is another sampler's")
        folder = self._store.temporary_folder / session.session_id / str(body.sampling_session_seq_id)
        await self._train(partial(_write, folder, run.model_id))
        weights = SamplerWeights(model_id=run.model_id, folder=folder / "sampler", version=run.version)
        unused: Path | None = None
        if body.kind == "inflight":
            unused = run.inflight.folder
            await self._switch.publish(run.inflight, folder / "sampler", run.version)
            weights = run.inflight
        sampler = self.sessions.add_sampler(session, body.sampling_session_seq_id, weights)
        if body.kind == "snapshot":
            run.snapshots.append(sampler)
            if len(run.snapshots) > MAX_SNAPSHOTS:
                oldest = run.snapshots.pop(0)
                del session.samplers[oldest.sampler_id]
                unused = oldest.weights.folder
        if unused is not None:
            await self._storing.run(partial(shutil.rmtree, unused.parent, ignore_errors=True))
        return sampler

    async def describe_weights(self, owner: str, body: ApiCallBody) -> Answer:
        found = await self._get_checkpoint(body.path or "", owner)
        lora = found.lora or {}
        parts = {name: lora.get(name) for name in ("train_unembed", "train_mlp", "train_attn")}
        is_lora = found.lora is not None
        return {"base_model": found.base_model, "is_lora": is_lora, "lora_rank": lora.get("rank"), **parts}

    async def list_checkpoints(self, owner: str, model_id: str | None = None, *, page: slice = slice(None)) -> Answer:
        saved = await self._storing.run(partial(self._store.list_checkpoints, owner=owner, model_id=model_id))
        return {"checkpoints": [each.describe() for each in saved[page]], "cursor": _make_cursor(page, len(saved))}

    async def delete_checkpoint(self, owner: str, model_id: str, kind: str, name: str) -> Answer:
        found = await self._get_checkpoint(f"tinker://{model_id}/{kind}/{name}", owner)
        await self._storing.run(partial(self._store.delete_checkpoint, found, owner=owner))
        return None

    async def list_runs(self, owner: str, *, page: slice = slice(None)) -> Answer:
        runs = await self._storing.run(partial(self._store.list_models, owner=owner))
        saved = await self._storing.run(partial(self._store.list_checkpoints, owner=owner))
        described = [run.describe(owner, [each for each in saved if each.model_id == run.model_id]) for run in runs]
        return {"training_runs": described[page], "cursor": _make_cursor(page, len(described))}

    async def describe_run(self, owner: str, model_id: str) -> Answer:
        found = await self._storing.run(partial(self._store.find_model, model_id, owner=owner))
        if found is None:
            raise HttpError(404, f"this key has no model {model_id[:200]!r}")
        saved = await self._storing.run(partial(self._store.list_checkpoints, owner=owner, model_id=model_id))
        return found.describe(owner, saved)

    # Sampling

    async def create_sampler(self, owner: str, body: ApiCallBody) -> Answer:
        session = self.sessions.get(body.session_id, owner=owner)
        weights = self._base
        if body.model_path is None or body.base_model is not None:
            self._check_base(body.base_model)
        if body.model_path is not None:
            checkpoint = await self._get_checkpoint(body.model_path, owner)
            self._check_kind(checkpoint.lora)
            folder = self._store.folder_of(checkpoint) / "sampler"
            weights = SamplerWeights(model_id=checkpoint.model_id, folder=folder, version=checkpoint.version)
        number = body.sampling_session_seq_id or 0
        sampler = self.sessions.add_sampler(session, number, weights, model_path=body.model_path)
        return {"type": "create_sampling_session", "sampling_session_id": sampler.sampler_id}

    async def join_sampler(self, owner: str, body: ApiCallBody) -> Answer:
        """Give a copy of a sampler, in another process, its number."""
        sampler = self.sessions.get_sampler(body.sampling_session_id, owner=owner)
        sampler.num_clones += 1
        return {"type": "join_sampling_session", "client_counter": sampler.num_clones}

    async def describe_sampler(self, owner: str, sampler_id: str) -> Answer:
        sampler = self.sessions.get_sampler(sampler_id, owner=owner)
        return {"sampler_id": sampler_id, "base_model": self._base_model, "model_path": sampler.model_path}

    async def sample(self, owner: str, body: CompletionsBody) -> Answer:
        """Sample completions of a prompt; the promise of before, if the call comes again."""
        if body.sampling_session_id is None or body.seq_id is None:
            raise HttpError(400, "asample needs sampling_session_id and seq_id: use an SDK >= 0.38")
        sampler = self.sessions.get_sampler(body.sampling_session_id, owner=owner)
        request_id, content = f"{sampler.sampler_id}:{body.seq_id}", _encode(body)
        if known := self.promises.find_repeated(request_id, "sample", content):
            return known
        max_n = self._context.config.limits.max_n
        if body.num_samples > max_n:
            raise HttpError(400, f"num_samples must lie in [1, {max_n}] (max_n), got {body.num_samples}")
        promise = self.promises.open(request_id, "sample", content, owner=owner, model_id=sampler.weights.model_id)
        promise.sequence_ids = [f"{request_id}:{index}" for index in range(body.num_samples)]
        work = partial(self._sample, sampler, body, promise.sequence_ids)
        promise.task = asyncio.create_task(self.promises.run(promise, work))
        return promise

    async def _sample(self, sampler: TinkerSampler, body: CompletionsBody, sequence_ids: list[str]) -> PromiseResult:
        sequences, scores = await sample(self._context, self._switch, sampler.weights, body)
        recorded = [
            RecordedSequence(
                sequence_id=sequence_id,
                owner=sampler.owner,
                model_id=sampler.weights.model_id,
                prompt_ids=body.prompt.to_ids(self._engine.vocab_size),
                ids=each.completion_ids,
                logprobs=each.rollout_logprobs,
                version_spans=self._switch.find_versions(each),
            )
            for each, sequence_id in zip(sequences, sequence_ids, strict=True)
        ]
        await self._storing.run(partial(self._store.add_sequences, recorded))
        answer = encode_sample(sequences, scores, num_tops=body.topk_sample_logprobs)
        return PromiseResult(body=answer, media_type=PROTOBUF)

    async def describe_sequence(self, owner: str, sequence_id: str) -> Answer:
        """A sampled sequence, with the version of the weights of each id (the hosted API has no such path)."""
        found = await self._storing.run(partial(self._store.find_sequence, sequence_id, owner=owner))
        if found is None:
            raise HttpError(404, f"this key has no sequence {sequence_id[:200]!r}")
        return {
            "sequence_id": found.sequence_id,
            "model_id": found.model_id or None,
            "prompt_ids": found.prompt_ids,
            "completion_ids": found.ids,
            "logprobs": found.logprobs,
            "version_spans": found.version_spans,
        }

    # Promises

    async def retrieve(self, owner: str, body: ApiCallBody) -> Answer:
        """The result of a call, or after some seconds that it is still to come."""
        promise = self.promises.find(body.request_id, owner=owner)
        if promise is None:
            name = body.request_id.rpartition(":")[0]
            if self.sessions.has(name, owner=owner):
                return FORGOTTEN
            gone = await self.explain_gone(name, owner)
            unknown = f"call {body.request_id[:200]!r} is not known: the server started again"
            return {"error": unknown if gone.status == 404 else gone.message, "category": "server"}
        with suppress(TimeoutError):
            await asyncio.wait_for(promise.done.wait(), _POLL_S)
        if promise.result is None:
            return {"type": "try_again", "request_id": body.request_id, "queue_state": "active"}
        self.promises.note_sent(promise)
        return promise.result

    async def cancel(self, owner: str, body: ApiCallBody) -> Answer:
        """End a sampling call whose result nobody waits for."""
        promise = self.promises.find(body.request_id, owner=owner)
        if promise is not None and promise.kind == "sample":
            promise.cancel()
        return None


def _encode(body: BaseModel) -> bytes:
    """What a call is known by when it comes again."""
    return json.dumps(body.model_dump()).encode()


def _make_cursor(page: slice, number: int) -> dict[str, int]:
    start, stop = page.start or 0, number if page.stop is None else page.stop
    return {"offset": start, "limit": stop - start, "total_count": number}


def read_adam(given: Mapping[str, Any]) -> AdamParams:
    """Read the parameters of a step; `InvalidInputError` for another optimizer's, or values that are no numbers."""
    if given.get("type", "adamw") not in ("adam", "adamw"):
        raise InvalidInputError(f"optim_params must be Adam's, got type {given['type']!r:.100}")
    found = {name: given[name] for name in AdamParams.__slots__ if given.get(name) is not None}
    for name, number in found.items():
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise InvalidInputError(f"adam_params.{name} must be a number, got {number!r:.100}")
    return AdamParams(**found)


def check_name(name: str) -> str:
    """Return a checkpoint's name; `InvalidInputError` unless it is one that can be part of a path."""
    if not re.fullmatch(r"(?!\.)[\w.-]{1,200}", name, re.ASCII):
        raise InvalidInputError(
            "a checkpoint's name must have 1 to 200 letters, digits and . _ -, and not begin with a dot, got "
            f"{name[:300]!r}"
        )
    return name


def check_finite(tensors: NamedTensors) -> NamedTensors:
    """Pass weights on; `TrainingError` for those that are not finite, which no engine and no checkpoint gets."""
    for name, tensor in tensors:
        if not tensor.isfinite().all():
            raise TrainingError(f"weight {name} is not finite, so it is not saved: load a checkpoint into this model")
        yield name, tensor


def _write(folder: Path, model_id: str, backend: Models, *, state: bool = False) -> int:
    """Write what engines take of a model, and with `state` what training goes on from; returns the bytes of all."""
    with atomic_folder(folder) as temporary:
        if state:
            backend.save(model_id, temporary / "state", optimizer=True)
        (temporary / "sampler").mkdir()
        list(write_tensors(temporary / "sampler", check_finite(backend.adapter(model_id))))
        for path in (temporary / "sampler").iterdir():  # `save` has flushed its own
            flush_to_disk(path)
        return sum(path.stat().st_size for path in temporary.rglob("*") if path.is_file())
