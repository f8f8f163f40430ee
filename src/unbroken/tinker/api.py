"""What the paths of the Tinker API do. Their bodies are the SDK's own types."""

from __future__ import annotations

import asyncio
import json
import math
import re
import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import astuple, replace
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from pydantic import BaseModel
from tinker import types
from tinker.proto import tinker_public_pb2 as messages

from unbroken.errors import EngineError, ExportError, InvalidInputError, StoreError, UnbrokenError
from unbroken.server.context import ServerContext
from unbroken.server.http.errors import HttpError
from unbroken.server.http.json import encode_json
from unbroken.server.options import ServeOptions
from unbroken.server.policies import CHECKPOINT, Policy, split_version
from unbroken.threads import DaemonThreads
from unbroken.tinker.losses import add_metrics, encode_forward_backward, parse_forward_backward, read_data
from unbroken.tinker.options import TinkerOptions
from unbroken.tinker.provenance import ProvenanceCheck
from unbroken.tinker.sampling import SamplerWeights, WeightSwitch, sample
from unbroken.tinker.sessions import MAX_SNAPSHOTS, Promise, Promises, TinkerSession, TrainingRun
from unbroken.tinker.store import CallResult, Checkpoint, ModelFacts, RecordedSequence, TinkerStore
from unbroken.weights.files import write_tensors
from unbroken.weights.folders import atomic_folder, flush_to_disk

if TYPE_CHECKING:
    from unbroken.tinker.models import Models, TrainerProcess

T = TypeVar("T")
Answer: TypeAlias = Promise | CallResult | dict[str, Any] | list[dict[str, Any]] | None
Made: TypeAlias = dict[str, Any] | CallResult
"""The result of a call of a model."""
_MAX_TTL_S = 10 * 365 * 86400
_POLL_S = 20.0
"""How long a result is waited for before the client asks again; the SDK gives an answer 45 s."""


class _WeightsInfoRequest(BaseModel):
    """The body of `weights_info`, for which the SDK has no type."""

    tinker_path: str


class _CallOfModel(BaseModel):
    """What the bodies of calls of a model have in common."""

    model_id: str
    seq_id: int | None = None


class TinkerApi:
    """What the paths do, by methods of their names, for the owner of a key (a hash of it).

    Those that take a run are called in the order of the run's calls.
    """

    def __init__(
        self,
        context: ServerContext,
        *,
        switch: WeightSwitch,
        store: TinkerStore,
        options: TinkerOptions,
        serving: ServeOptions,
        open_backend: Callable[[], Models | TrainerProcess],
    ) -> None:
        """The backend is opened with the first model; `switch` has the engine."""
        self._context, self._store, self._options, self._model = context, store, options, serving.model
        self._open_backend = open_backend
        self._backend: Models | TrainerProcess | None = None
        """Where new models are made."""
        self._training, self._storing = DaemonThreads(1), DaemonThreads(1)
        self._switch, self._engine = switch, switch.engine
        self._promises: dict[str, Promises] = {}
        """By owner."""
        self._sessions: dict[str, TinkerSession] = {}
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def _base_model(self) -> str:
        return self._context.config.model_name

    async def _train(self, run: TrainingRun, work: Callable[[Models], T]) -> T:
        """Run `work`, which can be pickled, where the model of a run was made: here, or in the trainer's process."""

        def call() -> T:
            if run.backend is None:
                run.backend = self._backend = self._backend or self._open_backend()
            return run.backend.run(work)

        try:
            return await self._training.run(call)
        except EngineError:
            if self._backend is run.backend:
                self._backend = None
            for session in tuple(self._sessions.values()):
                if any(each.backend is run.backend for each in session.runs.values()):
                    self._end_soon(session, "the trainer's process ended")
            raise

    async def _in_store(self, work: Callable[..., T], *values: Any, **options: Any) -> T:
        """What a method of the store returns."""
        return await self._storing.run(partial(work, *values, **options))

    async def _find(self, find: Callable[..., T | None], name: str, owner: str) -> T:
        """What one of the store's methods `find_...` returns for a name; `HttpError` if this key has none."""
        if (found := await self._in_store(find, name, owner=owner)) is None:
            raise HttpError(404, f"this key has no {find.__name__.removeprefix('find_')} {name[:300]!r}")
        return found

    def _promises_of(self, owner: str) -> Promises:
        return self._promises.setdefault(owner, Promises(self._store, self._storing, owner))

    async def _free(self, run: TrainingRun) -> None:
        """Free the model of a run, if it was made."""
        if run.backend is not None:
            with suppress(UnbrokenError):
                await self._train(run, methodcaller("delete", run.model_id))

    async def describe_server(self, owner: str) -> Answer:
        model = {"model_name": self._base_model, "max_context_length": self._engine.context_length}
        return {"supported_models": [{**model, "trainable": True, "sampleable": True}]}

    # Sessions

    async def create_session(self, owner: str, body: types.CreateSessionRequest) -> Answer:
        session = TinkerSession(session_id=str(uuid.uuid4()), owner=owner)
        self._sessions[session.session_id] = session
        self._note_life(session)
        return {"type": "create_session", "session_id": session.session_id}

    def _note_life(self, session: TinkerSession) -> None:
        """End a session later, unless its client gives another sign of life."""
        if session.end is not None:
            session.end.cancel()
        idle_s, loop = self._options.tinker_idle_s, asyncio.get_running_loop()
        session.end = loop.call_later(idle_s, self._end_soon, session, f"its client was silent for {idle_s:g} s")

    def _end_soon(self, session: TinkerSession, reason: str) -> None:
        task = asyncio.create_task(self._end_session(session, reason))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _end_session(self, session: TinkerSession, reason: str) -> None:
        """End a session, and free what it has."""
        if self._sessions.pop(session.session_id, None) is None:
            return
        self._promises_of(session.owner).cancel_samples(f"{session.session_id}:")
        for run in tuple(session.runs.values()):
            await run.end(reason)
            with suppress(StoreError):  # the next server notes that it stopped
                await self._in_store(self._store.end_model, run.model_id, reason)
            await self._free(run)
        folder = self._store.temporary_folder / session.session_id
        await self._storing.run(partial(shutil.rmtree, folder, ignore_errors=True))

    def _find_session(self, name: str, owner: str) -> TinkerSession | None:
        """The session of this owner, of which this is the name, or of a model or sampler: the client is alive."""
        session = self._sessions.get(name.partition(":")[0])
        if session is None or session.owner != owner:
            return None
        self._note_life(session)
        return session

    def _get_session(self, session_id: str | None, owner: str, *, status: int = 404) -> TinkerSession:
        session = self._find_session(session_id or "", owner)
        if session is None:
            raise HttpError(
                status,
                f"session {(session_id or '')[:100]!r} is not open: it has finished, its client was silent for "
                f"{self._options.tinker_idle_s:g} s, or the server started again. Make a new ServiceClient",
            )
        return session

    async def session_heartbeat(self, owner: str, body: types.SessionHeartbeatRequest) -> Answer:
        self._get_session(body.session_id, owner, status=410)
        return {"type": "session_heartbeat"}

    async def finish_session(self, owner: str, session_id: str) -> Answer:
        await self._end_session(self._get_session(session_id, owner), "its client has finished")
        return None

    # Models

    async def create_model(self, owner: str, body: types.CreateModelRequest) -> Answer:
        return await self._begin_model(owner, body)

    async def _begin_model(self, owner: str, body: types.CreateModelRequest | types.LoadWeightsRequest) -> Promise:
        """Make a model, of the base model or of a checkpoint; the promise of before, if the call comes again."""
        session, checkpoint, restores_optimizer = self._get_session(body.session_id, owner), None, False
        if isinstance(body, types.LoadWeightsRequest):
            checkpoint = await self._find(self._store.find_checkpoint, body.path, owner)
            lora, restores_optimizer = checkpoint.lora, body.optimizer
        else:
            lora = body.lora_config.model_dump() if body.lora_config and body.lora_config.rank else None
        self._check_base(body.base_model, needed=checkpoint is None)
        self._check_kind(lora)
        promises, content = self._promises_of(owner), body.model_dump_json().encode()
        if not isinstance(body.optimizer_config or types.AdamOptimizerConfig(), types.AdamOptimizerConfig):
            raise HttpError(400, f"optimizer_config must be Adam's, got {body.optimizer_config!r:.200}")
        model_id = f"{session.session_id}:train:{body.model_seq_id or 0}"
        if await promises.find(f"{model_id}:0"):
            return await promises.start(f"{model_id}:0", "create_model", content)
        self._check_room(owner)
        facts = ModelFacts(model_id=model_id, base_model=self._base_model, lora=lora, user_metadata=body.user_metadata)
        session.runs[model_id] = run = TrainingRun(facts, owner=owner, promises=promises)
        work = partial(self._create, session, run, checkpoint, restores_optimizer)
        return await run.submit(0, "create_model", work, content)

    def _check_room(self, owner: str) -> None:
        """Raise `HttpError` if a key trains as many models as it may."""
        number = sum(len(each.runs) for each in self._sessions.values() if each.owner == owner)
        if number >= (most := self._options.tinker_max_models):
            rule = f"this key trains {number} models, and may train {most} at a time (--tinker-max-models)"
            raise HttpError(400, f"{rule}: close another client")

    async def _create(
        self, session: TinkerSession, run: TrainingRun, checkpoint: Checkpoint | None, optimizer: bool
    ) -> Made:
        lora = run.facts.lora
        try:
            config = None if lora is None else types.LoraConfig(**lora)
            made = await self._train(run, methodcaller("create", run.model_id, config))
            run.facts = replace(run.facts, lora=None if made is None else made.model_dump())
            if checkpoint is not None:
                await self._load(run, checkpoint, optimizer)
            await self._in_store(self._store.put_model, run.facts, owner=run.owner)
        except BaseException:
            session.runs.pop(run.model_id, None)
            await self._free(run)
            raise
        if checkpoint is None:
            return {"model_id": run.model_id, "type": "create_model"}
        return {"path": checkpoint.path, "model_id": run.model_id, "type": "load_weights"}

    def _check_base(self, name: str | None, *, needed: bool) -> None:
        if name not in (self._base_model, self._model) and (needed or name is not None):
            raise HttpError(400, f"base_model must be {self._base_model!r}, this server's model, got {name!r:.200}")

    def _check_kind(self, lora: Mapping[str, Any] | None) -> None:
        """Raise `HttpError` unless an adapter, or all weights with None, is what this server's models are."""
        if (lora is None) != self._options.tinker_full:
            ours, other = ("all weights (rank 0)", "without") if self._options.tinker_full else ("adapters", "with")
            raise HttpError(400, f"this server trains {ours} alone: start one {other} --tinker-full for the other kind")

    async def _get_run(self, model_id: str, owner: str) -> TrainingRun:
        session = self._find_session(model_id, owner)
        if session is None or model_id not in session.runs:
            raise await self._explain_gone(model_id, owner)
        return session.runs[model_id]

    async def submit(self, owner: str, name: str, given: Mapping[str, Any], body_type: type[BaseModel]) -> Promise:
        """Take a call of a model, which the method of this name does in its turn; a body that is wrong fails then."""
        if name == "load_weights" and not given.get("model_id"):
            return await self._begin_model(owner, types.LoadWeightsRequest.model_validate(given, extra="ignore"))
        call = _CallOfModel.model_validate(given, extra="ignore")
        run = await self._get_run(call.model_id, owner)
        content = encode_json(given)

        async def work() -> Any:  # what waits is counted by its bytes, and parsed it may take 30 times as many
            return await getattr(self, name)(run, body_type.model_validate(json.loads(content), extra="ignore"))

        return await run.submit(call.seq_id, name, work, content)

    async def _find_facts(self, model_id: str, owner: str) -> tuple[ModelFacts, list[Checkpoint]]:
        """What is known of a training run, whose model may be gone, and its checkpoints, the newest first."""
        found = await self._find(self._store.find_model, model_id, owner)
        return found, await self._in_store(self._store.list_checkpoints, owner=owner, model_id=model_id)

    async def _explain_gone(self, model_id: str, owner: str) -> HttpError:
        """The error for a model that is not there: why, and how to continue."""
        try:
            found, saved = await self._find_facts(model_id, owner)
        except HttpError as error:
            return error
        advice, last = "nothing of it was saved by save_state", [each.path for each in saved if each.is_for_training]
        if last:
            advice = f"its last save_state is {last[0]}: go on by create_training_client_from_state_with_optimizer"
        return HttpError(410, f"model {model_id} is gone: {found.ended or 'its session has ended'}; {advice}")

    async def get_info(self, owner: str, body: types.GetInfoRequest) -> Answer:
        facts = (await self._get_run(body.model_id, owner)).facts
        return {
            "type": "get_info",
            "model_data": {"model_name": facts.base_model, "tokenizer_id": self._context.config.tokenizer},
            "model_id": body.model_id,
            "is_lora": facts.lora is not None,
            "lora_rank": None if facts.lora is None else facts.lora["rank"],
            "model_name": facts.base_model,
        }

    async def forward_backward(self, owner: str, body: bytes, content_type: str, encoding: str) -> Answer:
        """Compute the gradients of data, or the logprobs and the loss alone."""
        message = await asyncio.to_thread(parse_forward_backward, body, content_type, encoding)
        content = await asyncio.to_thread(message.SerializeToString, deterministic=True)
        run = await self._get_run(message.model_id, owner)
        kind = "forward" if message.forward_only else "forward_backward"
        return await run.submit(message.seq_id, kind, partial(self._forward_backward, run, content), content)

    async def _forward_backward(self, run: TrainingRun, content: bytes) -> Made:
        message = await asyncio.to_thread(messages.ForwardBackwardRequest.FromString, content)
        data = await asyncio.to_thread(read_data, message, self._engine.vocab_size, self._engine.context_length)
        policy, loss, given = self._options.tinker_provenance, message.loss_fn, message.loss_fn_config_v2.items()
        config = {name: value.text if value.WhichOneof("value") == "text" else value.number for name, value in given}
        check = ProvenanceCheck(self._store, policy, run, loss=loss)
        checked, metrics = await self._in_store(check.check, data)
        arguments = run.model_id, checked, loss, config, not message.forward_only
        output = await self._train(run, methodcaller("forward_backward", *arguments))
        if not message.forward_only:
            run.counted = add_metrics([run.counted, output.metrics, metrics])
        return CallResult(answer=encode_forward_backward(output, metrics), is_protobuf=True)

    async def optim_step(self, run: TrainingRun, body: types.OptimStepRequest) -> Made:
        if not isinstance(body.optim_params, types.AdamParams):
            raise InvalidInputError(f"optim_params must be Adam's, got type {body.optim_params.type!r:.100}")
        metrics = await self._train(run, methodcaller("optim_step", run.model_id, body.optim_params))
        run.version += 1
        known = {name: each for name, each in {**run.counted, **metrics}.items() if math.isfinite(each)}
        run.counted = {}
        with suppress(StoreError):  # the step is made: an error would have it made again
            await self._in_store(self._store.add_step, run.model_id, run.version, known)
        return {"metrics": metrics}

    # Checkpoints

    async def save_weights(self, run: TrainingRun, body: types.SaveWeightsRequest) -> Made:
        """Save a model with its optimizer, so that training can continue from there."""
        return await self._save(run, "weights", body, overwrites=body.overwrite)

    async def _save(
        self,
        run: TrainingRun,
        kind: str,
        body: types.SaveWeightsRequest | types.SaveWeightsForSamplerRequest,
        *,
        overwrites: bool = False,
    ) -> Made:
        """Save a model in its own folder: one that is replaced is whole until the new one's row is written."""
        name = f"{body.seq_id:06}" if body.path is None else body.path
        if not re.fullmatch(r"(?!\.)[\w.-]{1,200}", name, re.ASCII):
            rule = "must have 1 to 200 letters, digits and . _ -, and not begin with a dot"
            raise InvalidInputError(f"a checkpoint's name {rule}, got {name[:300]!r}")
        if body.ttl_seconds is not None and not 1 <= body.ttl_seconds <= _MAX_TTL_S:
            raise InvalidInputError(f"ttl_seconds must lie in [1, {_MAX_TTL_S}], got {body.ttl_seconds}")
        path = f"tinker://{run.model_id}/{kind}/{name}"
        known = await self._in_store(self._store.find_checkpoint, path, owner=run.owner)
        if known is not None and not overwrites:
            raise InvalidInputError(f"{path} is there already: give another name, or to save_state overwrite=True")
        checkpoint = Checkpoint(
            path=path,
            folder=f"{name[:100]}-{uuid.uuid4().hex}",  # until it is whole, its own name is 34 characters longer
            model_id=run.model_id,
            base_model=run.facts.base_model,
            lora=run.facts.lora,
            version=run.version,
            num_bytes=0,
            user_metadata=body.user_metadata,
            expires=None if body.ttl_seconds is None else time.time() + body.ttl_seconds,
        )
        folder, state = self._store.folder_of(checkpoint), checkpoint.is_for_training
        num_bytes = await self._train(run, partial(_write, folder, run.model_id, state=state))
        written = replace(checkpoint, num_bytes=num_bytes)
        await self._in_store(self._store.put_checkpoint, written, owner=run.owner)
        return {"path": path, "type": body.type}

    async def load_weights(self, run: TrainingRun, body: types.LoadWeightsRequest) -> Made:
        await self._load(run, await self._find(self._store.find_checkpoint, body.path, run.owner), body.optimizer)
        return {"path": body.path, "model_id": run.model_id, "type": "load_weights"}

    async def _load(self, run: TrainingRun, checkpoint: Checkpoint, optimizer: bool) -> None:
        if not checkpoint.is_for_training:
            raise InvalidInputError(f"{checkpoint.path} is for sampling alone: load what save_state saved")
        folder = self._store.folder_of(checkpoint) / "state"
        await self._train(run, methodcaller("load", run.model_id, folder, optimizer))
        run.version += 1
        run.counted = {}

    async def save_weights_for_sampler(self, run: TrainingRun, body: types.SaveWeightsForSamplerRequest) -> Made:
        """Save the weights for sampling: under a name, or for a sampler that is made of them."""
        if body.path is not None:
            return await self._save(run, "sampler_weights", body)
        number = body.sampling_session_seq_id
        if number is None:
            raise InvalidInputError("save_weights_for_sampler needs path or sampling_session_seq_id, got neither")
        session = self._get_session(run.model_id, run.owner)
        sampler_id = f"{session.session_id}:sample:{number}"
        if sampler_id in session.samplers:
            raise InvalidInputError(f"sampling_session_seq_id {number} is another sampler's")
        folder = self._store.temporary_folder / session.session_id / str(number)
        await self._train(run, partial(_write, folder, run.model_id))
        weights = SamplerWeights(model_id=run.model_id, folder=folder / "sampler", version=run.version)
        unused: Path | None = None
        if body.kind == "inflight":
            unused, weights = run.inflight.folder, run.inflight
            await self._switch.publish(weights, folder / "sampler", run.version)
        else:
            run.snapshots.append(sampler_id)
            if len(run.snapshots) > MAX_SNAPSHOTS:
                unused = session.samplers.pop(run.snapshots.pop(0)).folder
        session.samplers[sampler_id] = weights
        if unused is not None:
            await self._storing.run(partial(shutil.rmtree, unused.parent, ignore_errors=True))
        return {"sampling_session_id": sampler_id, "type": body.type}

    async def weights_info(self, owner: str, body: _WeightsInfoRequest) -> Answer:
        found = await self._find(self._store.find_checkpoint, body.tinker_path, owner)
        lora = found.lora or {}
        parts = {name: lora.get(name) for name in ("train_unembed", "train_mlp", "train_attn")}
        return {"base_model": found.base_model, "is_lora": bool(lora), "lora_rank": lora.get("rank"), **parts}

    async def list_checkpoints(self, owner: str, model_id: str | None = None) -> Answer:
        saved = await self._in_store(self._store.list_checkpoints, owner=owner, model_id=model_id)
        return [each.describe() for each in saved]

    async def delete_checkpoint(self, owner: str, model_id: str, kind: str, name: str) -> Answer:
        found = await self._find(self._store.find_checkpoint, f"tinker://{model_id}/{kind}/{name}", owner)
        await self._in_store(self._store.delete_checkpoint, found)
        return None

    async def list_runs(self, owner: str) -> Answer:
        runs = await self._in_store(self._store.list_models, owner=owner)
        saved = await self._in_store(self._store.list_checkpoints, owner=owner)
        return [run.describe(owner, saved) for run in runs]

    async def describe_run(self, owner: str, model_id: str) -> Answer:
        found, saved = await self._find_facts(model_id, owner)
        return found.describe(owner, saved)

    # Sampling

    async def create_sampling_session(self, owner: str, body: types.CreateSamplingSessionRequest) -> Answer:
        session = self._get_session(body.session_id, owner)
        self._check_base(body.base_model, needed=body.model_path is None)
        weights = self._switch.base
        if body.model_path is not None:
            checkpoint = await self._find_checkpoint(body.model_path, owner)
            if checkpoint is None:
                raise HttpError(404, f"this key has no checkpoint {body.model_path[:300]!r}")
            self._check_kind(checkpoint.lora)
            _, weights = self._switch.name_weights(checkpoint, self._store.folder_of(checkpoint) / "sampler")
        sampler_id = f"{session.session_id}:sample:{body.sampling_session_seq_id}"
        session.samplers.setdefault(sampler_id, weights)
        return {"type": "create_sampling_session", "sampling_session_id": sampler_id}

    async def find_policy(self, owner: str, name: str) -> Policy | None:
        """What a name means at another door; None if it means nothing there."""
        if (found := await self._find_checkpoint(name, owner)) is None:
            return None
        adapter, _ = self._switch.name_weights(found, self._store.folder_of(found) / "sampler")
        return Policy(name=split_version(name)[0], adapter=adapter, version=found.version)

    async def _find_checkpoint(self, name: str, owner: str) -> Checkpoint | None:
        """The checkpoint of a name: of a path, or of a run the newest one or that of a version; None if there is none.

        tinker://RUN/sampler_weights/a    tinker://RUN/weights/b    tinker://RUN    tinker://RUN@latest    tinker://RUN@3
        """
        path, version = split_version(name)
        wanted = None if version in (None, "latest") else int(version or 0)
        model_id = path.removeprefix(CHECKPOINT)
        if "/" in model_id:
            named = await self._in_store(self._store.find_checkpoint, path, owner=owner)
            saved = [] if named is None else [named]
        else:
            saved = await self._in_store(self._store.list_checkpoints, owner=owner, model_id=model_id)
        found = [each for each in saved if not each.is_over and wanted in (None, each.version)]
        return max(found, key=lambda each: (each.version, each.made), default=None)

    def get_sampler(self, sampler_id: str, owner: str) -> SamplerWeights:
        """What a sampler of this owner samples from; otherwise `HttpError`."""
        session = self._find_session(sampler_id, owner)
        if session is None or sampler_id not in session.samplers:
            why = f"its session has ended, or the server started again, or its model has {MAX_SNAPSHOTS} newer ones"
            raise HttpError(410, f"sampling session {sampler_id[:200]!r} is gone: {why}. Make another SamplingClient")
        return session.samplers[sampler_id]

    async def join_sampling_session(self, owner: str, body: types.JoinSamplingSessionRequest) -> Answer:
        """Give a copy of a sampler, in another process, its number."""
        self.get_sampler(body.sampling_session_id, owner)
        session = self._get_session(body.sampling_session_id, owner)
        session.num_clones += 1
        return {"type": "join_sampling_session", "client_counter": session.num_clones}

    async def describe_sampler(self, owner: str, sampler_id: str) -> Answer:
        path = self.get_sampler(sampler_id, owner).path
        return {"sampler_id": sampler_id, "base_model": self._base_model, "model_path": path}

    async def asample(self, owner: str, body: types.SampleRequest) -> Answer:
        """Sample completions of a prompt; the promise of before, if the call comes again."""
        if body.sampling_session_id is None or body.seq_id is None:
            raise HttpError(400, "asample needs sampling_session_id and seq_id: use an SDK >= 0.38")
        weights = self.get_sampler(body.sampling_session_id, owner)
        max_n = self._context.config.limits.max_n
        if not 1 <= body.num_samples <= max_n:
            raise HttpError(400, f"num_samples must lie in [1, {max_n}] (max_n), got {body.num_samples}")
        promises, request_id = self._promises_of(owner), f"{body.sampling_session_id}:{body.seq_id}"
        promise = await promises.start(request_id, "sample", body.model_dump_json().encode())
        promise.sequence_ids = [f"{request_id}:{index}" for index in range(body.num_samples)]
        if promise.task is None and promise.result is None:
            work = partial(self._sample, weights, body, promise.sequence_ids)
            promise.task = asyncio.create_task(promises.run(promise, work))
        return promise

    async def _sample(self, weights: SamplerWeights, body: types.SampleRequest, names: list[str]) -> Made:
        asked, sequences, answer = await sample(self._context, self._switch, weights, body)
        record = partial(
            RecordedSequence, model_id=weights.model_id, prompt_ids=asked.prompt_ids, sampling=asked.params.changes
        )
        recorded = [record(sequence_id=name, sampled=each) for name, each in zip(names, sequences, strict=True)]
        return CallResult(answer=answer, is_protobuf=True, sequences=recorded)

    async def describe_sequence(self, owner: str, sequence_id: str) -> Answer:
        """A sampled sequence, with the version of the weights of each id (the hosted API has no such path)."""
        found = await self._find(self._store.find_sequence, sequence_id, owner)
        return {
            "sequence_id": found.sequence_id,
            "model_id": found.model_id or None,
            "prompt_ids": found.prompt_ids,
            "completion_ids": found.sampled.completion_ids,
            "logprobs": found.sampled.rollout_logprobs,
            "version_spans": list(map(astuple, found.sampled.version_spans)),
        }

    # Promises

    async def retrieve_future(self, owner: str, body: types.FutureRetrieveRequest) -> Answer:
        """The result of a call, or after some seconds that it is still to come."""
        if (promise := await self._promises_of(owner).find(body.request_id)) is None:
            gone = await self._explain_gone(body.request_id.rpartition(":")[0], owner)
            unknown = f"call {body.request_id[:200]!r} is not known: the server started again, or it is too long ago"
            return {"error": unknown if gone.status == 404 else gone.message, "category": "server"}
        result = await promise.wait(_POLL_S)
        return result or {"type": "try_again", "request_id": body.request_id, "queue_state": "active"}

    async def retrieve_futures(self, owner: str, body: types.FuturesRetrieveRequest) -> Answer:
        """Which calls of a sampler have ended since the last question; their results are asked for one by one."""
        self._get_session(body.target.sampling_session_id, owner, status=410)
        timeout_s, of = _POLL_S if body.timeout is None else min(body.timeout, _POLL_S), body.target
        wait = self._promises_of(owner).wait_for_samples
        ended = await wait(of.sampling_session_id, of.cloned_sampler_id, after=body.prev_cursor, timeout_s=timeout_s)
        done = [{"state": "finished", "request_id": request_id} for _, request_id in ended]
        return {"completions": done, "cursor": ended[-1][0] if ended else body.prev_cursor}

    async def cancel_future(self, owner: str, body: types.FutureRetrieveRequest) -> Answer:
        """End a sampling call whose result nobody waits for."""
        if promise := await self._promises_of(owner).find(body.request_id):
            promise.cancel()
        return None


def _write(folder: Path, model_id: str, backend: Models, *, state: bool = False) -> int:
    """Write what engines take of a model, and with `state` what training continues from; returns the bytes of all.
    `StoreError` if the disk does not take it, and nothing is left of it.
    """
    try:
        with atomic_folder(folder) as temporary:
            if state:
                backend.save(model_id, temporary / "state", optimizer=True)
            (temporary / "sampler").mkdir()
            list(write_tensors(temporary / "sampler", backend.adapter(model_id)))
            for path in (temporary / "sampler").iterdir():  # `save` has flushed its own
                flush_to_disk(path)
            return sum(path.stat().st_size for path in temporary.rglob("*") if path.is_file())
    except (OSError, ExportError) as error:
        rule = "nothing was saved, and the model is as it was: free space, and save again"
        raise StoreError(f"weights cannot be written in {folder.parent}: {error}. {rule}") from error
