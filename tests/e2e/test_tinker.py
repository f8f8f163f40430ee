"""`unbroken serve --tinker` under the unmodified SDK, and under calls that no SDK makes."""

from __future__ import annotations

import pickle
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import tinker
from tinker import types
from tinker.proto import tinker_public_pb2 as messages

from support.image_servers import image_file
from support.postgres import run_postgres
from support.served import Served, save_tiny_model, served
from support.tinker_loops import KEY, RawClient, make_datum, make_message, no_leaks, put_tensor  # noqa: F401
from support.vision import save_vision_model
from unbroken.viewer.resources import open_runs

pytestmark = pytest.mark.filterwarnings(
    *(f"ignore::{kind}" for kind in ("DeprecationWarning", "FutureWarning", "UserWarning", "ResourceWarning"))
)
DOCUMENTATION = Path(__file__).parents[2] / "docs" / "tinker.md"
PROMPT = [1, 2, 3]
SAMPLING = types.SamplingParams(max_tokens=8, temperature=1.0, seed=3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with start(model, tmp_path_factory.mktemp("store")) as running:
        yield running


def start(model: Path, store: Path | str, *options: str) -> Any:
    return served(model, "--tinker", "--tinker-store", str(store), *options, engine="transformers")


def connect(server: Served, key: str = KEY) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=server.url, api_key=key)


def sample(client: Any, number: int = 1) -> list[types.SampledSequence]:
    prompt = types.ModelInput.from_ints(PROMPT)
    return client.sample(prompt, num_samples=number, sampling_params=SAMPLING).result(60).sequences


def step(client: tinker.TrainingClient, data: list[types.Datum], loss: str = "importance_sampling") -> dict[str, float]:
    done = client.forward_backward(data, loss)
    client.optim_step(types.AdamParams(learning_rate=1e-2)).result(60)
    return done.result(60).metrics


def test_the_sdk_runs_a_whole_loop(server):
    service = connect(server)
    client = service.create_lora_training_client(base_model="tiny", rank=4, seed=1).result()
    assert client.get_info().lora_rank == 4
    assert client.get_tokenizer().encode("a")
    before = client.save_weights_and_get_sampling_client().result()
    sequences = sample(before, 4)
    assert len({each.sequence_id for each in sequences}) == 4
    done = client.forward_backward([make_datum(PROMPT, each) for each in sequences], "importance_sampling").result(60)
    sampled = sum(len(each.tokens) for each in sequences)
    assert done.metrics["provenance_proven:sum"] == sampled
    assert done.metrics["provenance_logprobs_changed:sum"] == 0
    assert done.metrics["loss:sum"] == pytest.approx(-sampled, rel=1e-5)
    for output, each in zip(done.loss_fn_outputs, sequences, strict=True):
        logprobs = output["logprobs"].to_numpy()[len(PROMPT) - 1 :]
        np.testing.assert_allclose(logprobs, each.logprobs, atol=1e-4)
    assert client.optim_step(types.AdamParams(learning_rate=1e-2)).result(60).metrics["grad_norm"] > 0
    after = client.save_weights_and_get_sampling_client().result()
    full = types.ModelInput.from_ints([*PROMPT, *sequences[0].tokens])
    scores = [each.compute_logprobs(full).result(60) for each in (before, after, before)]
    assert scores[0] == scores[2]
    np.testing.assert_allclose(scores[0][len(PROMPT) :], sequences[0].logprobs, atol=1e-4)
    assert sum(scores[1][3:]) > sum(scores[0][3:])  # each advantage was 1
    base = service.create_sampling_client(base_model="tiny").result().compute_logprobs(full).result(60)
    np.testing.assert_allclose(base[1:], scores[0][1:], atol=1e-4)
    path = client.save_state("a").result(60).path
    named = client.save_weights_for_sampler("b").result(60).path
    loaded = service.create_training_client_from_state_with_optimizer(path).result()
    outputs = [each.forward([make_datum(PROMPT, sequences[0])], "importance_sampling") for each in (client, loaded)]
    logprobs = [each.result(60).loss_fn_outputs[0]["logprobs"].tolist() for each in outputs]
    assert logprobs[0] == logprobs[1]
    assert service.create_sampling_client(model_path=named).result().compute_logprobs(full).result(60) == scores[1]
    service.close(status="success").result(60)  # frees its weights: the base's are restored all the same
    base = connect(server).create_sampling_client(base_model="tiny").result().compute_logprobs(full).result(60)
    np.testing.assert_allclose(base[1:], scores[0][1:], atol=1e-4)
    rest = tinker.RestClient(base_url=server.url, api_key=KEY)
    assert {path, named} <= {each.tinker_path for each in rest.list_user_checkpoints().result().checkpoints}
    assert rest.get_weights_info_by_tinker_path(path).result().lora_rank == 4


def test_the_sdk_runs_a_loop_on_vllm(model, tmp_path):
    lora = ("--enable-lora", "--max-lora-rank", "16", "--max-loras", "3")
    with served(model, "--tinker", "--tinker-store", str(tmp_path), *lora) as server:
        service = connect(server)
        client = service.create_lora_training_client(base_model="tiny", rank=4, seed=1).result()
        before = client.save_weights_and_get_sampling_client().result()
        sequences = sample(before, 2)
        metrics = step(client, [make_datum(PROMPT, each) for each in sequences])
        assert metrics["provenance_proven:sum"] == sum(len(each.tokens) for each in sequences)
        after = client.save_weights_and_get_sampling_client().result()
        base = service.create_sampling_client(base_model="tiny").result()
        full = types.ModelInput.from_ints([*PROMPT, *sequences[0].tokens])
        old, new, again, first = (each.compute_logprobs(full).result(60)[3:] for each in (before, after, before, base))
        np.testing.assert_allclose(old, sequences[0].logprobs, atol=1e-3)
        np.testing.assert_allclose([old, old], [again, first], atol=1e-3)
        assert sum(new) > sum(old)


def test_the_block_of_the_documentation_runs(server, capsys):
    (text,) = re.findall(r"```python\n(import tinker.*?)```", DOCUMENTATION.read_text(), re.DOTALL)
    exec(text.replace("http://127.0.0.1:8000", server.url).replace("path/to/model", "tiny"), {})
    *steps, path = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in steps] == ["0", "1", "2"]
    assert path.startswith("tinker://")


def test_more_calls_than_the_queue_has_room_for_wait(model, tmp_path):
    with start(model, tmp_path, "--max-queued", "4") as server:
        client = connect(server).create_sampling_client(base_model="tiny").result()
        prompt = types.ModelInput.from_ints(PROMPT)
        answers = [client.sample(prompt, 2, SAMPLING) for _ in range(12)]
        assert all(len(each.result(60).sequences) == 2 for each in answers)
        metrics = httpx.get(f"{server.url}/metrics").text
        asked = re.findall(r'route="/api/v1/(retrieve_futures?)",status="200"}', metrics)
        assert set(asked) == {"retrieve_futures", "retrieve_future"}


def test_copies_of_a_sampler_have_calls_of_their_own(server, monkeypatch):
    """As in other processes, which get them pickled."""
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    client = connect(server).create_sampling_client(base_model="tiny").result()
    copies = [client, *(pickle.loads(pickle.dumps(client)) for _ in range(2))]
    answers = [each.sample(types.ModelInput.from_ints(PROMPT), 1, SAMPLING) for each in copies for _ in range(4)]
    assert len({each.result(60).sequences[0].sequence_id for each in answers}) == len(answers)


def test_all_weights_are_trained_with_rank_0(model, tmp_path):
    with start(model, tmp_path, "--tinker-full") as server:
        service = connect(server)
        client = service.create_lora_training_client(base_model="tiny", rank=0).result()
        assert client.get_info().is_lora is False
        before = client.save_weights_and_get_sampling_client().result()
        (sequence,) = sample(before)
        step(client, [make_datum(PROMPT, sequence)])
        after = client.save_weights_and_get_sampling_client().result()
        base = service.create_sampling_client(base_model="tiny").result()
        full = types.ModelInput.from_ints([*PROMPT, *sequence.tokens])
        old, new, first = (sum(each.compute_logprobs(full).result(60)[3:]) for each in (before, after, base))
        assert new > old
        assert first == pytest.approx(old, abs=1e-3)


def test_sampling_parameters(server):
    client = connect(server).create_sampling_client(base_model="tiny").result()
    prompt = types.ModelInput.from_ints([5, 6, 7, 8])
    one, two = (client.sample(prompt, 1, SAMPLING, topk_sample_logprobs=2).result(60).sequences[0] for _ in range(2))
    assert one.tokens == two.tokens  # the same seed
    assert [len(each) for each in one.topk_logprobs] == [2] * len(one.tokens)
    stop = types.SamplingParams(max_tokens=8, temperature=0, stop=[client_id := greedy(client, prompt)[2]])
    stopped = client.sample(prompt, 1, stop).result(60).sequences[0]
    assert (stopped.tokens[-1], stopped.stop_reason) == (client_id, "stop")
    targets = types.TensorData.from_numpy(np.array([[6, 9], [-1, 7], [8, -1]], np.int64))
    answer = client.sample(
        prompt,
        1,
        types.SamplingParams(max_tokens=1),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=3,
        target_prompt_logprobs=targets,
        prompt_logprobs_last_n=2,
    ).result(60)
    whole = client.compute_logprobs(prompt).result(60)
    assert answer.prompt_logprobs == [None, None, *whole[2:]]
    assert [each is None for each in answer.topk_prompt_logprobs] == [True, True, False, False]
    found = answer.target_prompt_logprobs.to_numpy()
    np.testing.assert_allclose([found[0, 0], found[1, 1], found[2, 0]], whole[1:], atol=1e-6)
    assert found[1, 0] == found[2, 1] == 0
    for refused in ({"prompt_alt_tokens_k": 2}, {"include_prompt_logprobs": False, "topk_prompt_logprobs": 2}):
        with pytest.raises(tinker.RequestFailedError, match=next(reversed(refused))):
            client.sample(prompt, 1, SAMPLING, **refused).result(60)


def test_prompts_have_images(tmp_path, server):
    pytest.importorskip("torchvision", reason="the image processors of transformers need it")
    cat, dog = (image_file(56, 56, seed=seed).data for seed in (0, 1))  # of 4 ids each

    def prompt(data: bytes, *more: int, number: int | None = 4) -> types.ModelInput:
        image = types.ImageChunk(data=data, format="png", expected_tokens=number)
        chunks = [types.EncodedTextChunk(tokens=PROMPT), image, types.EncodedTextChunk(tokens=[5, *more])]
        return types.ModelInput(chunks=chunks)

    with start(save_vision_model(tmp_path / "model"), tmp_path / "store") as vision:
        client = connect(vision).create_sampling_client(base_model="tiny").result()
        (sequence,) = client.sample(prompt(cat), 1, SAMPLING).result(60).sequences
        right, other = (client.compute_logprobs(prompt(each, *sequence.tokens)).result(60) for each in (cat, dog))
        np.testing.assert_allclose(right[len(PROMPT) + 5 :], sequence.logprobs, atol=1e-4)
        assert np.abs(np.subtract(other[len(PROMPT) + 5 :], sequence.logprobs)).max() > 1e-4
        recorded = RawClient(vision.url).http.get(f"sequences/{sequence.sequence_id}").json()["prompt_ids"]
        assert [*recorded[:3], *recorded[7:]] == [*PROMPT, 5]
        assert len(set(recorded[3:7])) == 1
        with pytest.raises(tinker.RequestFailedError, match=r"prompt.chunks\[1\].expected_tokens must be 4, .* got 9"):
            client.sample(prompt(cat, number=9), 1, SAMPLING).result(60)
        with pytest.raises(tinker.RequestFailedError, match=r"images of prompt\[0\] "):
            client.sample(prompt(b"no picture"), 1, SAMPLING).result(60)
    client = connect(server).create_sampling_client(base_model="tiny").result()
    with pytest.raises(tinker.RequestFailedError, match="this server takes no images"):
        client.sample(prompt(cat), 1, SAMPLING).result(60)


def greedy(client: tinker.SamplingClient, prompt: types.ModelInput) -> list[int]:
    return client.sample(prompt, 1, types.SamplingParams(max_tokens=8, temperature=0)).result(60).sequences[0].tokens


def test_a_datum_with_one_id_changed_is_refused_with_the_position(server):
    client = connect(server).create_lora_training_client(base_model="tiny", rank=4).result()
    (sequence,) = sample(client.save_weights_and_get_sampling_client().result())
    good = make_datum(PROMPT, sequence)
    last = len(sequence.tokens) - 1  # is a target alone
    for change, place in (
        (0, "model_input, span 1, position 3"),
        (last, f"loss_fn_inputs, span 1, position {last + 2}"),
    ):
        wrong = make_datum(PROMPT, sequence, change=change)
        with pytest.raises(tinker.RequestFailedError) as refused:
            client.forward_backward([good, wrong], "importance_sampling").result(60)
        assert refused.value.category == types.RequestErrorCategory.User
        ids = f"id {sequence.tokens[change]} at {change}, and id {(sequence.tokens[change] + 1) % 256} was given"
        assert re.search(rf"data\[1\].{place}: .* {ids}", str(refused.value))
    # Nothing of the refused requests was trained.
    assert client.optim_step(types.AdamParams()).result(60).metrics["grad_norm"] == 0


def test_false_spans_are_counted_where_they_are_not_refused(model, tmp_path):
    with start(model, tmp_path, "--tinker-provenance", "count") as server:
        client = connect(server).create_lora_training_client(base_model="tiny", rank=4).result()
        (sequence,) = sample(client.save_weights_and_get_sampling_client().result())
        metrics = step(client, [make_datum(PROMPT, sequence, change=0)])
        assert metrics["provenance_false_spans:sum"] == 2
        plain = types.Datum(
            **{name: getattr(make_datum(PROMPT, sequence), name) for name in ("model_input", "loss_fn_inputs")}
        )
        metrics = step(client, [plain])
        assert metrics["provenance_matched:sum"] == len(sequence.tokens)
        assert metrics["provenance_version_lag:max"] == 1
        client.forward([plain], "importance_sampling").result(60)  # is no step's
        page = open_runs([tmp_path]).get("run/0/step/2000000")
        assert [line["trajectory"] for line in page["trajectories"]] == [sequence.sequence_id]
        values = page["metrics"]["values"]
        assert page["metrics"]["steps"] == [1, 2]
        assert values["provenance_false_spans:sum"] == [2, 0]
        assert values["provenance_matched:sum"] == [0, len(sequence.tokens)]
        assert values["grad_norm"][0] > 0


def test_in_flight_weights_have_a_version_for_each_id(server):
    client = connect(server).create_lora_training_client(base_model="tiny", rank=4).result()
    sampler = client.save_weights_and_get_sampling_client(kind="inflight").result()
    prompt, raw = types.ModelInput.from_ints(PROMPT), RawClient(server.url)
    long = types.SamplingParams(max_tokens=700, temperature=1.0, stop=[])
    answer = sampler.sample(prompt, 1, long)
    data = [make_datum(PROMPT, *sample(sampler))]
    step(client, data)
    client.save_weights_and_get_sampling_client(kind="inflight").result()
    sequence = answer.result(120).sequences[0]
    recorded = raw.http.get(f"sequences/{sequence.sequence_id}").json()
    assert recorded["completion_ids"] == sequence.tokens
    assert [version for *_, version in recorded["version_spans"]] == [0, 1]
    metrics = client.forward([make_datum(PROMPT, sequence)], "importance_sampling").result(60).metrics
    assert metrics["provenance_version_lag:max"] == 1
    assert 0 < metrics["provenance_version_lag:mean"] < 1


def test_a_key_sees_its_own_models_alone(model, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("tml-one\ntml-two\n")
    options = ("--tinker-keys", str(keys), "--tinker-max-models", "1", "--api-key", "operator")
    with start(model, tmp_path / "store", *options) as server:
        mine = connect(server)
        client = mine.create_lora_training_client(base_model="tiny", rank=4).result()
        (sequence,) = sample(client.save_weights_and_get_sampling_client().result())
        path = client.save_state("a").result(60).path
        with pytest.raises(tinker.BadRequestError, match="--tinker-max-models"):
            mine.create_lora_training_client(base_model="tiny", rank=4).result()
        theirs, raw = connect(server, "tml-two"), RawClient(server.url, "tml-two")
        with pytest.raises(tinker.NotFoundError, match="no checkpoint"):
            theirs.create_training_client_from_state(path).result()
        for call, body in (
            ("optim_step", {"model_id": client.model_id, "seq_id": 9, "adam_params": {}}),
            ("get_info", {"model_id": client.model_id}),
            ("weights_info", {"tinker_path": path}),
        ):
            assert raw.http.post(call, json=body).status_code == 404, call
        assert raw.http.get("training_runs").json()["training_runs"] == []
        assert raw.http.get(f"sequences/{sequence.sequence_id}").status_code == 404
        other = theirs.create_lora_training_client(base_model="tiny", rank=4).result()
        with pytest.raises(tinker.RequestFailedError, match="has sampled no sequence"):
            other.forward_backward([make_datum(PROMPT, sequence)], "importance_sampling").result(60)
        assert RawClient(server.url, "tml-three").http.get("training_runs").status_code == 401
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "model": path}
        for key, status in (("tml-one", 200), ("tml-two", 404), ("operator", 404), ("tml-three", 401)):
            headers = {"authorization": f"Bearer {key}"}
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=60)
            assert answer.status_code == status, (key, answer.text)
            paused = httpx.post(f"{server.url}/resume", headers=headers, timeout=60)
            assert paused.status_code == (200 if key == "operator" else 401), key


def test_calls_run_once_and_in_order_however_they_arrive(server):
    raw = RawClient(server.url)
    _, model_id = raw.create_model("tiny")
    step_two = raw.post("optim_step", model_id=model_id, seq_id=2, adam_params={"learning_rate": 0.1})
    with pytest.raises(httpx.ReadTimeout):  # it waits for the first, and the connection is lost
        raw.http.post("retrieve_future", json=step_two, timeout=0.3)
    first = [raw.send(make_message(model_id, 1)).json() for _ in range(3)]
    assert len({each["request_id"] for each in first}) == 1
    outputs = [raw.wait(each) for each in first]
    assert outputs[0] == outputs[1]
    again = raw.post("optim_step", model_id=model_id, seq_id=2, adam_params={"learning_rate": 0.1})
    assert raw.wait(again) == raw.wait(step_two)
    assert raw.wait(again)["metrics"]["num_steps"] == 1


@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_a_killed_server_goes_on_from_the_last_save_state(model, tmp_path, database):
    with ExitStack() as stack:
        store, *files = (
            (tmp_path,)
            if database == "sqlite"
            else (stack.enter_context(run_postgres()).url, "--tinker-files", str(tmp_path))
        )
        server = stack.enter_context(start(model, store, *files))
        service = connect(server)
        client = service.create_lora_training_client(base_model="tiny", rank=4, seed=1).result()
        sampler = client.save_weights_and_get_sampling_client().result()
        sequences = sample(sampler, 2)
        data = [make_datum(PROMPT, each) for each in sequences]
        step(client, data)
        path = client.save_state("kept").result(60).path
        step(client, data)
        wanted = client.forward(data, "importance_sampling").result(60).loss_fn_outputs
        server.process.send_signal(signal.SIGKILL)
        server.process.wait(timeout=60)
        port = server.url.rpartition(":")[2]
        stack.enter_context(start(model, store, "--port", port, *files))
        call = {"request_id": sequences[0].sequence_id.rpartition(":")[0]}  # its answer may have been lost
        again = RawClient(server.url).http.post("retrieve_future", json=call).content
        for given, wanted_sequence in zip(messages.SampleResponse.FromString(again).sequences, sequences, strict=True):
            assert np.frombuffer(given.tokens, np.int32).tolist() == wanted_sequence.tokens
        with pytest.raises(tinker.APIStatusError, match=f"the server stopped; its last save_state is {path}"):
            client.forward(data, "importance_sampling").result(60)
        with pytest.raises(tinker.APIStatusError, match="is gone: its session has ended, or the server started again"):
            sample(sampler)
        loaded = connect(server).create_training_client_from_state_with_optimizer(path).result()
        assert step(loaded, data)["provenance_other_model:sum"] > 0  # of sequences that were sampled before
        found = loaded.forward(data, "importance_sampling").result(60).loss_fn_outputs
        assert [each["logprobs"].tolist() for each in found] == [each["logprobs"].tolist() for each in wanted]


def test_a_trainer_in_its_own_process_may_be_killed_and_the_server_goes_on_from_what_was_saved(model, tmp_path):
    with start(model, tmp_path, "--tinker-device", "0") as server:
        client = connect(server).create_lora_training_client(base_model="tiny", rank=4, seed=1).result()
        (sequence,) = sample(client.save_weights_and_get_sampling_client().result())
        data = [make_datum(PROMPT, sequence)]
        step(client, data)
        path = client.save_state("kept").result(60).path
        wanted = client.forward(data, "importance_sampling").result(60).loss_fn_outputs
        children = psutil.Process(server.process.pid).children(recursive=True)
        (trainer,) = [each for each in children if "spawn_main" in " ".join(each.cmdline())]
        trainer.kill()
        with pytest.raises(tinker.RequestFailedError, match=r"process has ended .exit code -9. with all") as failed:
            client.forward(data, "importance_sampling").result(60)
        assert failed.value.category == types.RequestErrorCategory.Server
        with pytest.raises(tinker.APIStatusError, match=f"the trainer's process ended; its last save_state is {path}"):
            client.forward(data, "importance_sampling").result(60)
        loaded = connect(server).create_training_client_from_state_with_optimizer(path).result()
        found = loaded.forward(data, "importance_sampling").result(60).loss_fn_outputs
        assert [each["logprobs"].tolist() for each in found] == [each["logprobs"].tolist() for each in wanted]
        (_,) = sample(loaded.save_weights_and_get_sampling_client().result())


def test_a_silent_client_has_its_models_freed(model, tmp_path):
    with start(model, tmp_path, "--tinker-idle-s", "5", "--tinker-max-models", "1") as server:
        raw = RawClient(server.url)
        session, model_id = raw.create_model("tiny")
        for _ in range(12):
            time.sleep(0.5)
            raw.post("session_heartbeat", session_id=session)
        time.sleep(7)
        gone = raw.http.post("optim_step", json={"model_id": model_id, "seq_id": 1, "adam_params": {}})
        assert gone.status_code == 410
        assert "its client was silent for 5 s; nothing of it was saved" in gone.text
        assert raw.http.post("session_heartbeat", json={"session_id": session}).status_code == 410
        raw.create_model("tiny")


def spoil_targets(message: Any, values: np.ndarray, name: str = "target_tokens") -> None:
    put_tensor(message.data[0], name, values)


def add_span(message: Any) -> None:
    span = message.data[0].model_input_spans.add().sampled_tokens
    span.sequence_id, span.length = "x", 2


BAD: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "data must have at least one datum": ("", lambda message: message.ClearField("data")),
    r"data\[0\]: target_tokens must lie in \[0, 591\), got 591 at position 1": (
        "", partial(spoil_targets, values=np.array([1, 591, 2]))
    ),
    r"target_tokens must have shape \[3\]": ("", partial(spoil_targets, values=np.array([1, 2]))),
    "target_tokens must be int64, got float32": ("", partial(spoil_targets, values=np.ones(3, np.float32))),
    "must be float32 or int64, got int32": ("", partial(spoil_targets, values=np.ones(3, np.int32), name="weights")),
    r"loss_fn_inputs\['weights'\]\[0\] must be finite": (
        "", partial(spoil_targets, values=np.full(3, np.nan, np.float32), name="weights")
    ),
    "must cover the field's 3 positions exactly, got 2": ("", add_span),
    "is made from spans, and not given": (
        "", partial(spoil_targets, values=np.ones(3, np.float32), name="sampled")
    ),
    "logprobs": ("ppo", lambda message: None),
}  # fmt: skip


def test_bad_data_are_user_errors_that_say_where_and_the_model_goes_on(server):
    raw = RawClient(server.url)
    _, model_id = raw.create_model("tiny")
    for number, (problem, (loss, spoil)) in enumerate(BAD.items(), start=1):
        message = make_message(model_id, number, loss=loss or "cross_entropy")
        spoil(message)
        result = raw.wait(raw.send(message).json())
        assert isinstance(result, dict), problem
        assert result["category"] == "user", result
        assert re.search(problem, result["error"]), result
    assert raw.wait(raw.send(make_message(model_id, len(BAD) + 1)).json()).metrics["loss:sum"] > 0


def test_bad_bodies_are_refused(server):
    raw = RawClient(server.url)
    session, model_id = raw.create_model("tiny")
    for body, headers, status in (
        (b"\xff\xff\xff", {}, 400),
        (make_message(model_id, 1), {"content-encoding": "zstd"}, 400),
        (b"", {"content-encoding": "br"}, 400),
        (b"{}", {"content-type": "application/json"}, 400),
        (make_message(model_id, 0), {}, 400),
        (make_message(model_id, 10**9), {}, 400),
        (make_message("nobody", 1), {}, 404),
    ):
        answer = raw.send(body, **headers)
        assert answer.status_code == status, answer.text
        assert answer.json()["error"]["message"]
    for path, body, status in (
        ("create_model", {"session_id": session, "model_seq_id": 1, "base_model": "other"}, 400),
        ("create_model", {"session_id": "x", "model_seq_id": 1, "base_model": "tiny"}, 404),
        ("load_weights", {"path": "tinker://x/weights/y", "optimizer": False, "session_id": session}, 404),
        ("create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0, "model_path": "x"}, 404),
        ("get_info", {}, 400),
        ("billing/usage", {}, 404),
    ):  # fmt: skip
        assert raw.http.post(path, json=body).status_code == status, path
    for number, name in enumerate(("../../x", ".hidden", "a/b", "x" * 300), start=1):
        failed = raw.wait(raw.post("save_weights", model_id=model_id, seq_id=number, path=name))
        assert failed["category"] == "user"
    failed = raw.wait(raw.post("optim_step", model_id=model_id, seq_id=5, adam_params={"learning_rate": -1}))
    assert "learning_rate must lie in [0, 1e12], got -1" in failed["error"]


def test_a_call_that_cannot_be_read_but_for_its_number_fails_and_later_ones_run(server):
    raw = RawClient(server.url)
    _, model_id = raw.create_model("tiny")
    for number, wrong in enumerate(({}, {"adam_params": []}, {"adam_params": {"beta1": "x"}}), start=1):
        later = raw.post("optim_step", model_id=model_id, seq_id=2 * number, adam_params={})
        failed = raw.wait(raw.post("optim_step", model_id=model_id, seq_id=2 * number - 1, **wrong))
        assert failed["category"] == "user"
        assert re.search("optim_params is required|adam_params.* must be", failed["error"]), failed
        assert raw.wait(later)["metrics"]["num_steps"] == number
    for given in ({"model_id": model_id}, {"model_id": [], "seq_id": 1}, {"model_id": model_id, "seq_id": "x"}):
        assert raw.http.post("optim_step", json=given).status_code == 400


def test_a_small_task_is_learned_by_a_loop_of_the_sdk(server):
    client = connect(server).create_lora_training_client(base_model="tiny", rank=8, seed=2).result()
    prompt = types.ModelInput.from_ints([10, 11])

    def reward(sequence: types.SampledSequence) -> float:
        return sum(each < 128 for each in sequence.tokens) / len(sequence.tokens)

    rewards: list[float] = []
    for _ in range(40):
        sampler = client.save_weights_and_get_sampling_client().result()
        sequences = (
            sampler.sample(prompt, num_samples=16, sampling_params=types.SamplingParams(max_tokens=6, stop=[]))
            .result(60)
            .sequences
        )
        found = [reward(each) for each in sequences]
        rewards.append(float(np.mean(found)))
        data = [make_datum([10, 11], each, one - rewards[-1]) for each, one in zip(sequences, found, strict=True)]
        client.forward_backward(data, "importance_sampling")
        client.optim_step(types.AdamParams(learning_rate=2e-2)).result(60)
        if np.mean(rewards[-3:]) >= 0.95:
            break
    assert rewards[0] < 0.6
    assert np.mean(rewards[-3:]) >= 0.9, rewards
