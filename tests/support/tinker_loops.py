"""Clients of the Tinker API: data with provenance, and calls without the SDK."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import numpy as np
import pytest
from tinker import types
from tinker.proto import tinker_public_pb2 as messages
from tinker.types.provenance_spans import PromptProvenanceSpan, SampledProvenanceSpan

from unbroken.tinker.losses import PROTOBUF
from unbroken.tinker.store import CallResult, RecordedSequence, TinkerStore
from unbroken.types import FinishReason, SampledSequence, VersionSpan

KEY = "tml-one"


@pytest.fixture(scope="module", autouse=True)
def no_leaks() -> Iterator[None]:
    """The SDK leaves the connections of its first calls open, and reports to servers that have stopped."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_TELEMETRY", "0")
        yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def make_datum(
    prompt: Sequence[int], sequence: types.SampledSequence, advantage: float = 1.0, *, change: int | None = None
) -> types.Datum:
    """A datum of importance_sampling with its spans; the sampled id at `change` is replaced."""
    ids = list(sequence.tokens)
    if change is not None:
        ids[change] = (ids[change] + 1) % 256
    full, number, name = [*prompt, *ids], len(ids), sequence.sequence_id
    given = len(prompt) - 1
    return types.Datum(
        model_input=types.ModelInput.from_ints(full[:-1]),
        loss_fn_inputs={
            "target_tokens": full[1:],
            "logprobs": [0.0] * given + sequence.logprobs,
            "advantages": [0.0] * given + [advantage] * number,
        },
    ).with_provenance(
        model_input=[
            PromptProvenanceSpan(sequence_id=name, length=len(prompt)),
            SampledProvenanceSpan(sequence_id=name, length=number - 1),
        ],
        loss_fn_inputs=[
            PromptProvenanceSpan(sequence_id=name, offset=1, length=given),
            SampledProvenanceSpan(sequence_id=name, length=number),
        ],
    )


def record(
    name: str,
    prompt_ids: Sequence[int],
    ids: Sequence[int],
    *,
    cut: int = -1,
    model_id: str = "run",
    finish: FinishReason = FinishReason.STOP,
    **options: Any,
) -> RecordedSequence:
    """A sequence whose ids from `cut` on are of version 4, and those before of 3."""
    number = len(ids)
    spans = ((0, cut % number, 3), (cut % number, number, 4))
    return RecordedSequence(
        sequence_id=name,
        model_id=model_id,
        prompt_ids=np.array(prompt_ids, np.int32),
        sampled=SampledSequence(
            completion_ids=np.array(ids, np.int32),
            rollout_logprobs=-np.arange(1, number + 1, dtype=np.float32) / np.float32(10),
            finish_reason=finish,
            version_spans=tuple(VersionSpan(start=a, stop=b, policy_version=version) for a, b, version in spans),
        ),
        **{"sampling": {}, **options},
    )


def add_sequences(store: TinkerStore, sequences: Sequence[RecordedSequence]) -> None:
    """Record what a call of the key `me` has sampled."""
    result = CallResult(answer=b"{}", sequences=sequences)
    store.put_result(f"call of {sequences[0].sequence_id}", b"", result, owner="me")


class RawClient:
    """The API's calls one by one, as no SDK would make them."""

    def __init__(self, url: str, key: str = KEY) -> None:
        self.http = httpx.Client(base_url=f"{url}/api/v1", headers={"X-API-Key": key}, timeout=60)

    def post(self, call: str, /, **body: Any) -> Any:
        """The answer of a call that succeeds."""
        answer = self.http.post(call, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def wait(self, promise: dict[str, Any]) -> Any:
        """The result of a promise."""
        while True:
            answer = self.http.post("retrieve_future", json={"request_id": promise["request_id"]})
            assert answer.status_code == 200, answer.text
            if answer.headers["content-type"].startswith(PROTOBUF):
                return messages.ForwardBackwardOutput.FromString(answer.content)
            if answer.json().get("type") != "try_again":
                return answer.json()

    def create_model(self, base: str, number: int = 0) -> tuple[str, str]:
        """A session and a model of it."""
        session = self.post("create_session", tags=[], user_metadata=None, sdk_version="0")["session_id"]
        promise = self.post(
            "create_model", session_id=session, model_seq_id=number, base_model=base, lora_config={"rank": 4, "seed": 1}
        )
        assert self.wait(promise)["type"] == "create_model"
        return session, promise["model_id"]

    def send(self, message: Any, **headers: str) -> httpx.Response:
        """Send a `forward_backward`."""
        body = message if isinstance(message, bytes) else message.SerializeToString()
        return self.http.post("forward_backward", content=body, headers={"content-type": PROTOBUF, **headers})


def make_message(model_id: str, seq_id: int, ids: Sequence[int] = (1, 2, 3, 4), *, loss: str = "cross_entropy") -> Any:
    """A `forward_backward` of one datum without spans."""
    message = messages.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, loss_fn=loss)
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array(ids[:-1], np.int32).tobytes()
    put_tensor(datum, "target_tokens", np.array(ids[1:], np.int64))
    put_tensor(datum, "weights", np.ones(len(ids) - 1, np.float32))
    return message


def put_tensor(datum: Any, name: str, values: np.ndarray) -> None:
    """Give a datum an input."""
    tensor = datum.loss_fn_inputs[name]
    tensor.dense, tensor.dtype = values.tobytes(), {"float32": 1, "int64": 2, "int32": 3}[values.dtype.name]
    del tensor.shape[:]
    tensor.shape.extend(values.shape)
