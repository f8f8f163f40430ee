"""The engine of a run: the right model behind it, or a clear word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.models import tiny_qwen3
from support.servers import listening, make_app, scripted_engine, server_tokenizer
from unbroken.errors import EngineError, InvalidInputError, ServerUnreachableError
from unbroken.runs.config import EngineConfig, EngineKind, WeightTransport
from unbroken.runs.engines import open_engine
from unbroken.runs.processes import Rank


def engine_of(config: EngineConfig, model: Any, output: Path) -> Any:
    return open_engine(config, model=model, source="tiny", output=output, device=torch.device("cpu"), rank=Rank())


def server(url: str, **options: Any) -> EngineConfig:
    return EngineConfig(
        **{"kind": EngineKind.SERVER, "urls": (url,), "weights_dir": Path("w"), "wait_s": 0.0, **options}
    )


async def test_an_embedded_engine_is_closed_with_the_run(tmp_path):
    model = tiny_qwen3()
    async with engine_of(EngineConfig(), model, tmp_path) as found:
        update = await found.publisher.publish(model.named_parameters(), policy_version=1)
        assert update.num_bytes > 0
    with pytest.raises(EngineError):
        await found.publisher.publish(model.named_parameters(), policy_version=2)


async def test_a_server_at_another_vocabulary_is_refused(tmp_path):
    num_ids = len(server_tokenizer())
    async with listening(make_app(scripted_engine("x"))) as url:
        with pytest.raises(InvalidInputError, match=rf"vocabulary has {num_ids} ids and the trainer's model 64"):
            async with engine_of(server(url), tiny_qwen3(), tmp_path):
                pass
        async with engine_of(server(url), tiny_qwen3(vocab_size=num_ids), tmp_path) as found:
            assert found.engine.vocab_size == num_ids


async def test_of_several_processes_the_first_publishes_to_servers(tmp_path):
    model = tiny_qwen3(vocab_size=len(server_tokenizer()))
    async with listening(make_app(scripted_engine("x"))) as url:
        second = Rank(index=1, num_processes=2)
        async with open_engine(
            server(url), model=model, source="tiny", output=tmp_path, device=torch.device("cpu"), rank=second
        ) as found:
            assert found.publisher is None


async def test_a_server_that_is_down_is_named(tmp_path):
    """At once when it had its time, without the client's usual retries."""
    with pytest.raises(ServerUnreachableError, match=r"127\.0\.0\.1:9 in 1 tries"):
        async with engine_of(server("http://127.0.0.1:9", wait_s=0.1), tiny_qwen3(), tmp_path):
            pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": EngineKind.SERVER}, r"urls must be given exactly with kind server, got \(\) with server"),
        ({"urls": ("http://a",)}, r"urls must be given exactly with kind server, got \('http://a',\) with embedded"),
        ({"kind": EngineKind.SERVER, "urls": ("http://a",)}, r"weights_dir must be given exactly with kind server and"),
        (
            {
                "kind": EngineKind.SERVER,
                "urls": ("http://a",),
                "weights_dir": Path("w"),
                "transport": WeightTransport.BROADCAST,
            },
            r"weights_dir must be given exactly with kind server and transport files",
        ),
        ({"serve_options": ("--port", "1")}, r"serve_options must be left out with kind embedded"),
    ],
)
def test_options_of_another_kind_are_refused(options, message):
    with pytest.raises(InvalidInputError, match=message):
        EngineConfig(**options)


@pytest.mark.parametrize(("contents", "message"), [(b"\xff\xfe", "can't decode byte 0xff"), (b" \n", "key is empty")])
async def test_a_key_file_that_holds_no_key_is_refused(tmp_path, contents, message):
    key = tmp_path / "key"
    key.write_bytes(contents)
    with pytest.raises(InvalidInputError, match=rf"engine\.api_key_file must be a text file with the key.*{message}"):
        async with engine_of(server("http://127.0.0.1:9", api_key_file=key), tiny_qwen3(), tmp_path):
            pass
