"""What must reach every rank of a server with several workers: each check asks all of its data-parallel copies."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

from support.adapted import with_lora
from unbroken.client import AsyncClient
from unbroken.errors import UnbrokenError
from unbroken.types import SampledSequence, SamplingParams
from unbroken.weights.files import write_weights

SESSIONS = ("first", "second")
"""While both are in flight, each has a data-parallel copy of its own."""
SCALE = 1.2
"""New weights are the old ones times this."""


@dataclass(kw_only=True)
class RankChecks:
    """The checks, in the order of `run`, and what they found."""

    url: str
    model: Any
    """The weights of the server's start, in the dtype and on the device of the comparison."""
    weights: Path
    """The server's `--weights-dir`."""
    num_workers: int
    tolerance: float
    """Of the mean |difference| of logprobs between the server and `model`."""
    num_ids: int = 1000
    """Of completions that an update interrupts."""
    new: Any = field(init=False)

    def __post_init__(self) -> None:
        self.new = copy.deepcopy(self.model)
        with torch.no_grad():
            for parameter in self.new.parameters():
                parameter.mul_(SCALE)

    async def run(self, *names: str) -> dict[str, str]:
        """Run the checks that are named, and return what each found; raises at the first that fails."""
        async with AsyncClient(self.url, max_retries=0, timeout_s=120) as client:
            return {name: await getattr(self, f"check_{name}")(client) for name in names}

    async def check_world_size(self, client: AsyncClient) -> str:
        """Of vLLM's route, TRL's and ours."""
        sizes = [await client.world_size(), (await client.weights_state())["world_size"]]
        async with httpx.AsyncClient(base_url=self.url) as http:
            sizes.append((await http.get("/get_world_size/")).json()["world_size"])
        assert sizes == [self.num_workers] * 3, sizes
        return f"{sizes[0]} workers"

    async def check_scores(self, client: AsyncClient) -> str:
        """Scores of prompts of several lengths in one step, at two temperatures, are those of the old weights."""
        return await self._compare_scores(client, self.model)

    async def check_update(self, client: AsyncClient) -> str:
        """An update in a pause: no copy samples meanwhile, and both go on with the new weights and their version."""
        folder = self._write(1, self.new)
        prompt = list(range(3, 40))
        chunks: dict[str, list[Any]] = {name: [] for name in SESSIONS}

        async def read(name: str) -> None:
            params = SamplingParams(max_tokens=self.num_ids, seed=1)
            async for chunk in client.stream(prompt, params, session_id=name):
                chunks[name].append(chunk)

        for _ in range(10):  # on a busy machine an answer may be over before the pause comes: ask again
            chunks.update({name: [] for name in SESSIONS})
            tasks = [asyncio.create_task(read(name)) for name in SESSIONS]
            while min(map(len, chunks.values())) < 5:  # noqa: ASYNC110  # of two readers
                await asyncio.sleep(0.005)
            await client.pause()
            await asyncio.sleep(0.2)
            if not any(
                task.done() or len(chunks[name]) > self.num_ids // 2 for name, task in zip(SESSIONS, tasks, strict=True)
            ):
                break
            await client.resume()
            await asyncio.gather(*tasks)
        assert not any(task.done() for task in tasks), "each answer was over before its pause"
        counts = [len(read_chunks) for read_chunks in chunks.values()]
        await asyncio.sleep(0.5)
        assert [len(read_chunks) for read_chunks in chunks.values()] == counts, "a copy samples in a pause"
        assert await client.load_weights(folder, policy_version=1)
        await asyncio.sleep(0.5)
        assert [len(read_chunks) for read_chunks in chunks.values()] == counts, "a copy samples in a pause"
        await client.resume()
        await asyncio.gather(*tasks)
        found = []
        for name in SESSIONS:
            spans = [(span.start, span.stop, span.policy_version) for span in chunks[name][-1].version_spans]
            ids = [int(one) for chunk in chunks[name] for one in chunk.completion_ids]
            logprobs = np.concatenate([chunk.rollout_logprobs for chunk in chunks[name]])
            stop = spans[0][1]
            assert stop >= 5
            assert spans == [(0, stop, 0), (stop, len(ids), 1)], spans
            whole = [*prompt, *ids]
            for part, model in ((slice(0, stop), self.model), (slice(stop, None), self.new)):
                expected = logprobs_of(model, whole)[len(prompt) - 1 :]
                self._assert_close(logprobs[part], expected[part])
            found.append(stop)
        assert await client.policy_version() == 1
        return f"versions change after {found} of {self.num_ids} ids; " + await self._compare_scores(client, self.new)

    async def check_refusal(self, client: AsyncClient) -> str:
        """A version without one of its weights changes nothing on any rank."""
        kept = list(self.model.named_parameters())[1:]
        folder = write_weights(self.weights / "incomplete", kept, policy_version=2).folder
        with suppress(UnbrokenError):
            await client.load_weights(folder, policy_version=2)
            raise AssertionError("an incomplete version was loaded")
        assert await client.policy_version() == 1
        return await self._compare_scores(client, self.new)

    async def check_adapter(self, client: AsyncClient) -> str:
        """A named adapter on the new weights, in each copy."""
        adapted = with_lora(copy.deepcopy(self.new), seed=3)
        folder = self.weights / "adapter"
        adapted.save_pretrained(folder)
        async with httpx.AsyncClient(base_url=self.url, timeout=60) as http:
            loaded = await http.post("/v1/load_lora_adapter", json={"lora_name": "own", "lora_path": str(folder)})
            assert loaded.status_code == 200, loaded.text
            text = await self._compare_samples(client, adapted, adapter="own")
            await self._compare_samples(client, self.new)
            gone = await http.post("/v1/unload_lora_adapter", json={"lora_name": "own"})
            assert gone.status_code == 200, gone.text
        return text

    async def check_policy_adapter(self, client: AsyncClient) -> str:
        """The policy as an adapter that comes by an update, for a server of the old weights."""
        adapted = with_lora(copy.deepcopy(self.model), seed=4)
        scale = adapted.peft_config["default"].lora_alpha / adapted.peft_config["default"].r
        matrices = [  # as a trainer publishes them: the model's names, and the scaling in B
            (
                name.removeprefix("base_model.model.").replace(".default", ""),
                value.detach() * (scale if ".lora_B." in name else 1),
            )
            for name, value in adapted.named_parameters()
            if ".lora_" in name
        ]
        folder = write_weights(self.weights, matrices, policy_version=1).folder
        assert await client.load_weights(folder, policy_version=1)
        text = await self._compare_samples(client, adapted, version=1)
        return f"{text}; {await self._compare_scores(client, adapted)}"

    async def check_sleep(self, client: AsyncClient) -> str:
        """Sleep until new weights come, version 2, which are the old ones."""
        before = memory_in_use()
        async with httpx.AsyncClient(base_url=self.url, timeout=60) as http:
            answer = await http.post("/sleep?level=2&mode=wait")
            assert answer.status_code == 200, answer.text
        asleep = memory_in_use()
        assert await client.load_weights(self._write(2, self.model), policy_version=2)
        text = await self._compare_samples(client, self.model, version=2)
        return f"{text}; {await self._compare_scores(client, self.model)}; GB in use {before} -> {asleep} asleep"

    async def check_packed(self, client: AsyncClient) -> str:
        """The next version comes by vLLM's packed broadcast, in two calls."""
        from support.packed_sender import PackedSender

        weights = [(name, value.detach().cpu()) for name, value in self.new.named_parameters()]
        version = await client.policy_version() + 1

        def send() -> None:
            sender = PackedSender(self.url, packed=True, packed_buffer_size_bytes=2**16)
            sender.start()
            for part in (weights[:5], weights[5:]):
                answer = sender.send(part)
                assert answer.status_code == 200, answer.text
            answer = sender.finish()
            assert answer.status_code == 200, answer.text
            sender.close()

        await asyncio.to_thread(send)
        assert await client.policy_version() == version
        return await self._compare_samples(client, self.new, version=version)

    def _write(self, version: int, model: Any) -> Path:
        return write_weights(self.weights, model.named_parameters(), policy_version=version).folder

    async def _compare_scores(self, client: AsyncClient, model: Any) -> str:
        """Twelve sequences in one call, which all copies get some of, beside as many at another temperature."""
        rng = np.random.default_rng(7)
        sequences = [rng.integers(3, 200, 5 + 3 * number).tolist() for number in range(12)]
        found = await asyncio.gather(*(client.score(sequences, temperature=t) for t in (1.0, 0.5)))
        differences = []
        for scored, temperature in zip(found, (1.0, 0.5), strict=True):
            for ids, one in zip(sequences, scored, strict=True):
                differences.append(self._assert_close(one.logprobs, logprobs_of(model, ids, temperature)))
        return f"scores |difference| {np.mean(differences):.1e}"

    async def _compare_samples(
        self, client: AsyncClient, model: Any, *, adapter: str | None = None, version: int | None = None
    ) -> str:
        """Both sessions at once, so that each copy samples."""
        prompt = list(range(50, 90))
        results = await asyncio.gather(
            *(
                client.generate(
                    [prompt], SamplingParams(max_tokens=24, seed=2), n=2, adapter=adapter, session_id=session
                )
                for session in SESSIONS
            )
        )
        sequences: Sequence[SampledSequence] = [
            sequence for result in results for one in result for sequence in one.sequences
        ]
        differences = []
        for sequence in sequences:
            expected = logprobs_of(model, [*prompt, *sequence.completion_ids.tolist()])[len(prompt) - 1 :]
            differences.append(self._assert_close(sequence.rollout_logprobs, expected))
            if version is not None:
                assert {span.policy_version for span in sequence.version_spans} == {version}, sequence.version_spans
        return f"samples |difference| {np.mean(differences):.1e}"

    def _assert_close(self, found: Any, expected: Any) -> float:
        difference = float(np.abs(np.asarray(found) - np.asarray(expected)).mean())
        assert difference < self.tolerance, f"mean |difference| {difference} of logprobs"
        return difference


@torch.no_grad()
def logprobs_of(model: Any, ids: Sequence[int], temperature: float = 1.0) -> Any:
    """[T - 1] of each id after the first."""
    tensor = torch.tensor([list(ids)], device=model.device)
    logits = model(tensor).logits[0, :-1].float() / temperature
    return torch.log_softmax(logits, -1).gather(1, tensor[0, 1:, None])[:, 0].cpu().numpy()


def memory_in_use() -> list[float]:
    """GB of each GPU that are in use."""
    pairs = [torch.cuda.mem_get_info(number) for number in range(torch.cuda.device_count())]
    return [round((total - free) / 1e9, 1) for free, total in pairs]
