"""The engine of a run: the right model behind it, or a clear word; the server that a run starts: its URL, log, end."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from support.models import tiny_qwen3
from support.servers import listening, make_app, scripted_engine, server_tokenizer
from support.stock_server import StockServer
from support.waits import wait_until
from unbroken.engines import directory
from unbroken.engines.base import AdapterRoom
from unbroken.engines.scripted import ScriptedEngine
from unbroken.errors import EngineError, InvalidInputError, ServerUnreachableError
from unbroken.rollout.policies import PoliciesConfig
from unbroken.runs import engines
from unbroken.runs.config import EngineConfig, EngineKind, WeightTransport
from unbroken.runs.engines import open_engine, start_server
from unbroken.runs.processes import Rank
from unbroken.training.config import TrainerConfig
from unbroken.types import Numerics
from unbroken.weights.disk import DiskPublisher
from unbroken.weights.sources import TensorSource

TALKATIVE = """
import sys, time
print("serves tiny at http://127.0.0.1:%s", flush=True)
for _ in range(100):
    print("x" * 10_000, flush=True)
open(sys.argv[1], "w").close()
while True:
    time.sleep(0.05)
"""

STUBBORN = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(f"serves tiny at http://127.0.0.1:{os.getpid()}", flush=True)
time.sleep(60)
"""


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


async def test_a_server_says_its_numerics_and_a_run_with_exact_ones_refuses_fast_ones(tmp_path):
    engine, model = scripted_engine("x"), tiny_qwen3(vocab_size=len(server_tokenizer()))
    how = {"model": model, "source": "tiny", "output": tmp_path, "device": torch.device("cpu"), "rank": Rank()}
    async with listening(make_app(engine)) as url:
        with pytest.raises(InvalidInputError, match="fast with an engine whose numerics are fast, got exact: start"):
            async with open_engine(server(url), **how, numerics=Numerics.EXACT):
                pass
    engine.numerics, engine.tensor_parallel_size = Numerics.EXACT, 2  # type: ignore[attr-defined]
    async with listening(make_app(engine)) as url, open_engine(server(url), **how, numerics=Numerics.EXACT) as found:
        assert found.engine.numerics is Numerics.EXACT
        assert found.adapt(TrainerConfig()).sampler_tensor_parallel == 2


async def test_a_policy_with_the_name_of_the_servers_model_is_refused_as_they_would_sample_the_model(tmp_path):
    model = tiny_qwen3(vocab_size=len(server_tokenizer()))
    how = {"model": model, "source": "tiny", "output": tmp_path, "device": torch.device("cpu"), "rank": Rank()}
    async with listening(make_app(scripted_engine("x"), model_name="solver")) as url:
        with pytest.raises(
            InvalidInputError, match=r"policies\.names must not have .* their model, got 'solver': give"
        ):
            async with open_engine(server(url), **how, policies=PoliciesConfig(names=("critic", "solver"))):
                pass
        async with open_engine(server(url), **how, policies=PoliciesConfig(names=("critic",))) as found:
            assert found.engine.model_name == "solver"


async def test_an_engine_with_too_little_room_for_the_run_s_adapters_is_refused_before_the_first_step(tmp_path):
    model = tiny_qwen3(vocab_size=len(server_tokenizer()))
    how = {"model": model, "source": "tiny", "output": tmp_path, "device": torch.device("cpu"), "rank": Rank()}
    wide, low = scripted_engine("x"), scripted_engine("x")
    wide.adapter_room = AdapterRoom(max_adapters=3, max_rank=32, how="--max-loras is 7", how_rank="32")  # type: ignore[attr-defined]
    low.adapter_room = AdapterRoom(max_adapters=12, max_rank=8, how="--max-loras is 25", how_rank="rank 8")  # type: ignore[attr-defined]
    two = PoliciesConfig(names=("solver", "critic"))
    copies = replace(two, copy_every=2)

    async with listening(make_app(wide)) as one, listening(make_app(low)) as other:
        refused: tuple[tuple[dict[str, Any], str], ...] = (
            (
                {"policies": copies, "adapter_rank": 8},
                r"policies must have at most 3 adapters at once with this engine \(engine.options, or the servers of "
                r"engine.urls\), got 12, those of policies.names, with up to 5 frozen copies of each "
                rf"\(policies.copy_every, policies.num_copies, loop.num_steps\): {one}: --max-loras is 7",
            ),
            (
                {"policies": two, "adapter_rank": 16},
                f"lora.rank must be at most 8 with this engine, got 16: {other}: rank 8",
            ),
        )
        for options, message in refused:
            with pytest.raises(InvalidInputError, match=message):
                async with open_engine(server(one, urls=(one, other)), **how, **options):
                    pass
        async with open_engine(server(one, urls=(one, other)), **how, policies=two, adapter_rank=8):
            pass
        async with open_engine(server(other), **how, policies=copies, adapter_rank=8):
            pass


async def test_room_for_copies_that_a_run_does_not_come_to_is_not_asked_for(tmp_path):
    """A server that is ahead, after a kill, has as many versions more."""
    model = tiny_qwen3(vocab_size=len(server_tokenizer()))
    how = {"model": model, "source": "tiny", "output": tmp_path, "device": torch.device("cpu"), "rank": Rank()}
    policies = PoliciesConfig(names=("solver", "critic"), copy_every=10)
    engine = scripted_engine("x")
    engine.adapter_room = AdapterRoom(max_adapters=2, max_rank=8, how="", how_rank="")  # type: ignore[attr-defined]
    how |= {"policies": policies, "adapter_rank": 8}

    async with listening(make_app(engine)) as url:
        async with open_engine(server(url), **how, versions=range(10)):
            pass
        with pytest.raises(InvalidInputError, match=r"at most 2 adapters .* got 4, .* up to 1 frozen copies"):
            async with open_engine(server(url), **how, versions=range(11)):
                pass
        await engine.update_weights(TensorSource([("w", torch.ones(1))]), policy_version=5)
        async with open_engine(server(url), **how, versions=range(2, 6)):  # 6 to 9
            pass
        with pytest.raises(InvalidInputError, match=r"at most 2 adapters .* got 4"):
            async with open_engine(server(url), **how, versions=range(2, 7)):
                pass


async def test_stock_vllm_is_refused_where_engines_get_adapters(tmp_path):
    model = tiny_qwen3(vocab_size=len(server_tokenizer()))
    how = {"model": model, "source": "tiny", "output": tmp_path, "device": torch.device("cpu"), "rank": Rank()}
    one = PoliciesConfig(names=("solver",))
    async with listening(StockServer(scripted_engine("x", allow_forks=True)).make_app()) as url:
        for policies, message in (
            (one, "policies must have at most 0 adapters .* got 1, those of policies.names"),
            (None, "trainer.lora_updates must be merged, or the engine started with room for .*, got adapter"),
        ):
            with pytest.raises(InvalidInputError, match=f"{message}: {url} is stock vLLM"):
                async with open_engine(server(url), **how, policies=policies, adapter_rank=8):
                    pass


def list_servers(listed: Path, *urls: str) -> None:
    """At once: a file that is half written counts, if the one who writes it is held up."""
    listed.with_suffix(".next").write_text("\n".join(urls))
    listed.with_suffix(".next").replace(listed)


async def test_the_servers_of_a_file_are_sampled_from_and_get_versions_as_it_lists_them(tmp_path, monkeypatch):
    monkeypatch.setattr(directory, "_POLL_S", 0.05)
    monkeypatch.setattr(engines, "_STILL_SENT_S", 0.0)
    model, listed = tiny_qwen3(vocab_size=len(server_tokenizer())), tmp_path / "engines.txt"
    first, second = scripted_engine("x"), scripted_engine("x")

    async def wait_for(urls: tuple[str, ...], loaded: ScriptedEngine, version: int) -> None:
        await wait_until(lambda: (found.engine.urls, loaded.policy_version) == (urls, version))

    async with (
        listening(make_app(first, weights_dir=tmp_path / "w")) as one,
        listening(make_app(second, weights_dir=tmp_path / "w")) as two,
    ):
        list_servers(listed, one)
        config = server(one, urls=(), urls_file=listed, weights_dir=tmp_path / "w")
        async with engine_of(config, model, tmp_path) as found:
            await found.publisher.publish(model.named_parameters(), policy_version=1)
            list_servers(listed, one, two)
            await wait_for((one, two), second, 1)
            await found.publisher.publish(model.named_parameters(), policy_version=2)
            assert (first.policy_version, second.policy_version) == (2, 2)
            list_servers(listed, two)
            await wait_for((two,), second, 2)
            await asyncio.sleep(0.3)
            update = await found.publisher.publish(model.named_parameters(), policy_version=3)
            assert (first.policy_version, second.policy_version, update.missed_by) == (2, 3, ())


async def test_versions_go_through_a_store_and_the_run_s_folder_has_the_newest(tmp_path):
    model, engine = tiny_qwen3(vocab_size=len(server_tokenizer())), scripted_engine("x")
    store = f"file://{tmp_path}/store"
    async with (
        listening(make_app(engine, versions_from=store)) as url,
        engine_of(server(url, weights_dir=None, versions_to=store), model, tmp_path / "run") as found,
    ):
        await found.publisher.publish(model.named_parameters(), policy_version=1)
        assert engine.policy_version == 1
    assert len(list((tmp_path / "run" / "weights").glob("version-00000001-*"))) == 1
    assert len(list((tmp_path / "store").glob("version-00000001-*/manifest.json"))) == 1


async def test_a_server_that_leaves_and_is_back_soon_misses_no_version(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(directory, "_POLL_S", 0.02)
    monkeypatch.setattr(directory, "_SETTLES_S", 0.0)
    monkeypatch.setattr(engines, "_STILL_SENT_S", 0.4)
    model, listed = tiny_qwen3(vocab_size=len(server_tokenizer())), tmp_path / "engines.txt"
    first, second = scripted_engine("x"), scripted_engine("x")
    admit = DiskPublisher.admit

    admitted: list[str] = []

    async def admit_slowly(publisher: DiskPublisher, client: Any) -> None:
        await admit(publisher, client)
        await asyncio.sleep(0.5)
        admitted.append(client.base_url)

    monkeypatch.setattr(DiskPublisher, "admit", admit_slowly)

    async with (
        listening(make_app(first, weights_dir=tmp_path / "w")) as one,
        listening(make_app(second, weights_dir=tmp_path / "w")) as two,
    ):
        list_servers(listed, one, two)
        config = server(one, urls=(), urls_file=listed, weights_dir=tmp_path / "w")
        async with engine_of(config, model, tmp_path) as found:
            list_servers(listed, one)
            await wait_until(lambda: caplog.text.count("longer") == 2)  # engine and publisher have seen it
            admitted.clear()
            list_servers(listed, one, two)
            await wait_until(lambda: found.engine.urls == (one, two) and two in admitted)
            await found.publisher.publish(model.named_parameters(), policy_version=1)
            assert (first.policy_version, second.policy_version) == (1, 1)


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
        (
            {"kind": EngineKind.SERVER},
            r"urls must be given .*, got \(\) with server: `unbroken serve MODEL`",
        ),
        ({"urls": ("http://a",)}, r"urls must be given exactly with kind server, got \('http://a',\) with embedded"),
        (
            {"versions_to": "s3://a/b"},
            r"weights_dir must be given exactly with kind server and transport files, got None",
        ),
        (
            {"kind": EngineKind.SERVER, "urls": ("http://a",), "versions_to": "s3://a/b", "weights_dir": Path("w")},
            r"weights_dir must be left out with versions_to, got w and s3://a/b",
        ),
        (
            {"kind": EngineKind.SERVER, "urls": ("http://a",), "versions_to": "/a/b"},
            r"versions_to must be a URL such as s3://bucket/run, got '/a/b'",
        ),
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
        ({"options": ("--port", "1")}, r"options must be left out with kind embedded"),
        ({"urls_file": Path("e")}, r"urls must be given exactly with kind server, got \(\) with embedded"),
        (
            {"kind": EngineKind.SERVER, "urls": ("http://a",), "urls_file": Path("e"), "weights_dir": Path("w")},
            r"urls must be left out with urls_file, got \('http://a',\) and e",
        ),
        (
            {"kind": EngineKind.SERVER, "urls_file": Path("e"), "transport": WeightTransport.BROADCAST},
            r"transport must be files with urls_file, got broadcast",
        ),
    ],
)
def test_options_of_another_kind_are_refused(options, message):
    with pytest.raises(InvalidInputError, match=message):
        EngineConfig(**options)


@pytest.mark.parametrize(("contents", "message"), [(b"\xff\xfe", "must be text in UTF-8"), (b" \n", "key is empty")])
async def test_a_key_file_that_holds_no_key_is_refused(tmp_path, contents, message):
    key = tmp_path / "key"
    key.write_bytes(contents)
    with pytest.raises(InvalidInputError, match=rf"engine\.api_key_file must be a text file with the key.*{message}"):
        async with engine_of(server("http://127.0.0.1:9", api_key_file=key), tiny_qwen3(), tmp_path):
            pass


async def test_a_server_that_prints_more_than_a_pipe_holds_goes_on_and_ends_with_the_run(tmp_path: Path):
    marker = tmp_path / "marker"
    command = [sys.executable, "-c", TALKATIVE % 1234, str(marker)]

    async with start_server(command, tmp_path / "server.log") as url:
        await wait_until(marker.exists)

    assert url == "http://127.0.0.1:1234"
    assert (tmp_path / "server.log").stat().st_size > 1_000_000


async def test_a_server_that_does_not_end_is_killed(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(engines, "_STOP_S", 0.1)
    async with start_server([sys.executable, "-c", STUBBORN], tmp_path / "server.log") as url:
        pid = int(url.rpartition(":")[2])
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_the_url_is_that_of_this_start_and_not_of_one_before(tmp_path: Path):
    log = tmp_path / "server.log"
    log.write_text("serves tiny at http://127.0.0.1:1\n")

    async with start_server([sys.executable, "-c", TALKATIVE % 2, str(tmp_path / "marker")], log) as url:
        assert url == "http://127.0.0.1:2"


async def test_a_server_that_ends_before_it_serves_is_an_error_that_names_its_log(tmp_path: Path):
    log = tmp_path / "server.log"
    with pytest.raises(EngineError, match=r"server\.log says why"):
        async with start_server([sys.executable, "-c", "raise SystemExit('no port')"], log):
            pass
    assert "no port" in log.read_text()


async def test_a_server_that_hangs_while_it_starts_is_ended_and_named(tmp_path: Path, caplog):
    log = tmp_path / "server.log"
    command = ["sh", "-c", "echo $$; exec sleep 600"]
    with pytest.raises(EngineError, match=rf"did not serve within 2 s \(wait_s\): see {log}"):
        async with start_server(command, log, wait_s=2.0):
            pass
    with pytest.raises(ProcessLookupError):
        os.kill(int(log.read_text()), 0)


async def test_a_line_that_comes_in_pieces_is_read_whole(tmp_path: Path):
    code = """
import sys, time
for part in ("serves ti", "ny at http://127", ".0.0.1:7", "\\n"):
    print(part, end="", flush=True)
    time.sleep(0.3)
time.sleep(60)
"""
    async with start_server([sys.executable, "-c", code], tmp_path / "server.log") as url:
        assert url == "http://127.0.0.1:7"
