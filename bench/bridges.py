"""Measures bridges beside full renderings: how many are exact, refused and wrong, and what a turn costs.

    OMP_NUM_THREADS=1 python bench/bridges.py                                   # all parts, an hour
    OMP_NUM_THREADS=1 python bench/bridges.py --part cost --template qwen3      # part of the names of templates
    OMP_NUM_THREADS=1 python bench/bridges.py --part generated --seeds 0:5000 --processes 2

exact      The chat templates that `trl` and `vllm` ship and those in `../shared/templates`, twins left out, with five
           kinds of tokenizers. transformers' own rendering of the whole conversation is the judge
           (`tests/support/corpus_oracle.py`): a bridge is *exact* if that ends with it, id for id, *wrong* if not, or
           if a new message is left out, repeated or moved. Where the judge finds that no bridge is possible, a refusal
           is right and not counted. `--write` makes the shares the bounds that the tests hold later changes to.
generated  Random templates that do something unusual on a random condition (`tests/support/template_generator.py`).
cost       A turn after long histories, beside rendering and tokenising everything; the first bridge of a conversation,
           beside later ones. Lengths of messages are drawn from distributions. Mistral's vocabulary of 131,072 ids.
memory     What a bridge allocates, and what a renderer keeps of conversations.
rollouts   CPU of rendering in 32 conversations at once, as an environment's rollouts have them.

Times are CPU times of the thread (`time.thread_time`), which other work on the machine makes longer, but not by much.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import gc
import json
import os
import random
import statistics
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unbroken.messages import Message
from unbroken.rendering.base import BridgeOutcome, Refusal
from unbroken.rendering.template import TemplateRenderer
from unbroken.types import TokenIds, token_ids

TESTS = Path(__file__).resolve().parent.parent / "tests"
BOUNDS = TESTS / "property" / "coverage.toml"
KINDS = ("bytes", "bytes, NFKC", "sentencepiece BPE, first", "Unigram with bytes", "Tekken")
NUM_LATER = 4
"""Turns after the first that are measured of each conversation."""
NUM_AT_ONCE = 32
"""Conversations of the parts memory and rollouts."""
NUM_TURNS = 8


def main() -> int:
    """Run the parts; the exit status is 1 if a bridge is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--part", action="append", choices=PARTS, help="by default all of them")
    parser.add_argument("--template", action="append", help="only those with this in their names, such as trl/qwen3")
    parser.add_argument("--conversations", type=int, default=100, help="turns to judge of each template (exact)")
    parser.add_argument("--kind", action="append", choices=KINDS, help="of tokenizers (exact); by default all five")
    parser.add_argument("--write", action="store_true", help=f"write the shares to {BOUNDS.name} (exact, bytes only)")
    parser.add_argument("--seeds", default="0:5000", help="of the generated templates: from and to (exclusive)")
    parser.add_argument("--each", type=int, default=12, help="conversations with each generated template")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4_000, 64_000, 128_000], help="in ids (cost)")
    parser.add_argument("--processes", type=int, default=1, help="for exact and generated")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"load {load:.1f} on {os.cpu_count()} cores{', a busy machine' if load > 1 else ''}")
    num_wrong = 0
    for part in arguments.part or PARTS:
        print(f"\n== {part}", flush=True)
        start = time.perf_counter()
        num_wrong += PARTS[part](arguments)
        print(f"({time.perf_counter() - start:.0f} s)", flush=True)
    return 1 if num_wrong else 0


def _find_support() -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.path.insert(0, str(TESTS))


def _pick_templates(parts_of_names: Sequence[str] | None) -> list[Any]:
    from support.corpus import distinct_templates

    return [
        template
        for template in distinct_templates()
        if not parts_of_names or any(part in template.name for part in parts_of_names)
    ]


def count_exact(arguments: argparse.Namespace) -> int:
    """Print what became of the turns of each template; returns the number of wrong bridges."""
    _find_support()
    kinds = arguments.kind or (["bytes"] if arguments.write else list(KINDS))
    names = [template.name for template in _pick_templates(arguments.template)]
    jobs = [(name, kind, arguments.conversations) for name in names for kind in kinds]
    totals: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
    refusals: Counter[str] = Counter()
    shares: dict[str, float] = {}
    for (name, kind, _), (counts, reasons, wrong) in zip(
        jobs, _map(_judge_template, jobs, arguments.processes), strict=True
    ):
        totals[kind] += counts
        refusals += reasons
        if kind == kinds[0] and _count_possible(counts):
            shares[name] = counts["exact"] / _count_possible(counts)
        if counts["refused"] or counts["wrong"]:
            print(f"{name} ({kind}): {_list_counts(counts)}; {_list_counts(reasons)}", flush=True)
        for text in wrong[:1]:
            print(f"  {text[-600:]}")
    print(f"{len(names)} templates; exact of the turns that can be bridged, wrong:")
    for kind, counts in totals.items():
        share = counts["exact"] / max(_count_possible(counts), 1)
        print(
            f"  {kind:30} {share:8.2%} of {_count_possible(counts):6}, {counts['wrong']} wrong; {_list_counts(counts)}"
        )
    least = sorted((share, name) for name, share in shares.items())[:5]
    print(f"the least of a template: {', '.join(f'{share:.0%} {name}' for share, name in least)}")
    print(f"refusals though possible: {_list_counts(refusals)}")
    if arguments.write:
        lines = [f"{json.dumps(name)} = {int(share * 100) / 100}" for name, share in sorted(shares.items())]
        BOUNDS.write_text(_BOUNDS_COMMENT + "\n".join(lines) + "\n", encoding="utf-8")
    return sum(counts["wrong"] for counts in totals.values())


_BOUNDS_COMMENT = """\
# Share of the turns that can be bridged that are, by chat template, rounded down. Written by
# `python bench/bridges.py --part exact --write`: a change that lowers one needs a reason.
"""


def _judge_template(job: tuple[str, str, int]) -> tuple[Counter[str], Counter[str], list[str]]:
    name, kind, num_conversations = job
    from support.corpus import corpus_template
    from support.corpus_runs import run_template

    tally = run_template(corpus_template(name), num_conversations, kind=kind)
    reasons = Counter({str(reason.value): num for reason, num in tally.refusals.items()})
    return Counter({str(key.value): num for key, num in tally.judgements.items()}), reasons, tally.wrong


def count_generated(arguments: argparse.Namespace) -> int:
    """Print what became of the turns of generated templates; returns the number of wrong bridges."""
    _find_support()
    first, _, last = arguments.seeds.partition(":")
    jobs = [(seed, arguments.each) for seed in range(int(first), int(last))]
    total: Counter[str] = Counter()
    for (seed, _), (condition, counts, wrong) in zip(jobs, _map(_judge_seed, jobs, arguments.processes), strict=True):
        total += counts
        for text in wrong[:1]:
            print(f"seed {seed}: {len(wrong)} wrong, {condition}\n  {text[-600:]}", flush=True)
    share = total["exact"] / max(_count_possible(total), 1)
    print(f"{len(jobs)} generated templates, {arguments.each} conversations each: {_list_counts(total)}")
    print(f"exact of the turns that can be bridged: {share:.2%}; wrong: {total['wrong']}")
    return total["wrong"]


def _judge_seed(job: tuple[int, int]) -> tuple[str, Counter[str], list[str]]:
    from support.generated_runs import judge_seed

    template, counts, wrong = judge_seed(*job)
    return template.condition, Counter({str(key.value): num for key, num in counts.items()}), wrong


def _map(function: Callable[[Any], Any], jobs: Sequence[Any], num_processes: int) -> Iterator[Any]:
    if num_processes == 1:
        yield from map(function, jobs)
        return
    with ProcessPoolExecutor(num_processes, initializer=_find_support) as pool:
        yield from pool.map(function, jobs, chunksize=4)


def _count_possible(counts: Counter[str]) -> int:
    return counts["exact"] + counts["refused"] + counts["wrong"]


def _list_counts(counts: Counter[str]) -> str:
    return ", ".join(f"{num} {name}" for name, num in counts.most_common()) or "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Seconds of CPU after one history."""

    num_ids: int
    num_messages: int
    first_s: float
    later_s: float
    full_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A turn with all that is there once it was answered."""

    history: list[Message]
    turn: Message
    new_messages: list[Message]
    completion_ids: TokenIds

    @property
    def everything(self) -> list[Message]:
        """The conversation with which the next prompt ends."""
        return [*self.history, self.turn, *self.new_messages]


class Subject:
    """One template with a tokenizer that has a real vocabulary, and conversations that it takes."""

    def __init__(self, name: str) -> None:
        from support.corpus import TEKKEN, corpus_template
        from support.corpus_oracle import CorpusOracle, facts_of
        from support.corpus_runs import TOOLS

        template = corpus_template(name)
        self.tokenizer = template.tokenizer(kind=TEKKEN)
        self._facts = facts_of(template)
        self._oracle = CorpusOracle(template, self.tokenizer, {}, TOOLS)

    def make_steps(self, seed: int | str, num_ids: int, num_steps: int) -> list[Step]:
        """Draw a conversation: a history of about so many ids, and the turns after it, sampled as the template has it.

        There are calls if the template shows them.
        """
        from support.corpus_conversations import JudgedConversation

        writer = ConversationWriter(random.Random(seed), max_calls=min(self._facts.most_calls, 2))
        history = writer.write_history(num_ids)
        steps: list[Step] = []
        for _ in range(num_steps):
            turn, new = writer.write_turn()
            judged = JudgedConversation(history=history, assistant=turn, new_messages=new, turn_marks=())
            completion_ids = token_ids(self._oracle.sampled_ids_of(judged))
            steps.append(Step(history=history, turn=turn, new_messages=new, completion_ids=completion_ids))
            history = steps[-1].everything
        return steps

    def bridge(self, renderer: TemplateRenderer, step: Step) -> BridgeOutcome:
        """Bridge a turn."""
        return renderer.bridge_to_next_turn(
            token_ids([]),
            step.completion_ids,
            step.new_messages,
            assistant=step.turn,
            tools=self._oracle.tools,
            earlier=step.history,
        )

    def measure_rendering_s(self, num_messages: int) -> float:
        """CPU seconds of one rendering of so many short messages: calls and results if the template shows calls."""
        renderer = TemplateRenderer(self.tokenizer)
        messages: list[Message] = [{"role": "user", "content": "Go on."}]
        while len(messages) < num_messages:
            messages.append({"role": "assistant", "content": "" if self._facts.most_calls else "Yes."})
            if not self._facts.most_calls:
                messages.append({"role": "user", "content": "Go on."})
                continue
            call: Any = {"name": "search", "arguments": {"a_text": "x"}}
            call_id = f"c{len(messages):08d}"
            messages[-1]["tool_calls"] = [{"id": call_id, "type": "function", "function": call}]
            messages.append({"role": "tool", "content": "42", "tool_call_id": call_id, "name": "search"})
        durations_s: list[float] = []
        for _ in range(4):
            start = time.thread_time()
            renderer.render_text(messages, tools=self._oracle.tools, add_generation_prompt=True)
            durations_s.append(time.thread_time() - start)
        return min(durations_s)

    def render(self, messages: list[Message]) -> list[int]:
        """Render and encode the whole conversation by transformers."""
        ids: list[int] = self._oracle.ids(self._oracle.text(messages, generation_prompt=True) or "")
        return ids


class ConversationWriter:
    """Writes messages. Lengths are drawn as agents have them: most are short, some very long."""

    def __init__(self, rng: random.Random, *, max_calls: int) -> None:
        self._rng = rng
        self._max_calls = max_calls
        self._num_calls = 0
        self._calls_left = 0
        self._size = 0

    def write_history(self, num_ids: int) -> list[Message]:
        """A question, and turns until there are about so many ids."""
        history: list[Message] = [{"role": "user", "content": self._write(200)}]
        while self._size < num_ids * CHARACTERS_PER_ID:
            turn, new = self.write_turn()
            history += [turn, *new]
        return history

    def write_turn(self) -> tuple[Message, list[Message]]:
        """The next turn and what follows it: results of its calls, or after some of those a question."""
        turn: Message = {"role": "assistant", "content": ""}
        if self._rng.random() < 0.3:
            turn["reasoning_content"] = self._write(150)
        if self._calls_left == 0 or self._max_calls == 0:
            self._calls_left = 1 + int(self._rng.expovariate(1 / 4))
            return {**turn, "content": self._write(80)}, [{"role": "user", "content": self._write(60)}]
        self._calls_left -= 1
        calls: list[Any] = []
        for _ in range(self._max_calls if self._rng.random() < 0.2 else 1):
            self._num_calls += 1
            function = {"name": "search", "arguments": {"a_text": self._write(25), "limit": self._num_calls % 9}}
            calls.append({"id": f"c{self._num_calls:08d}", "type": "function", "function": function})
        turn["tool_calls"] = calls
        return turn, [
            {"role": "tool", "content": self._write(200, most=8_000), "tool_call_id": call["id"], "name": "search"}
            for call in calls
        ]

    def _write(self, median: int, most: int = 2_000) -> str:
        """Text of a log-normal number of ids."""
        num_ids = min(int(median * self._rng.lognormvariate(0, 1.1)) + 1, most)
        start = self._rng.randrange(len(TEXT) - most * CHARACTERS_PER_ID)
        text = TEXT[start : start + num_ids * CHARACTERS_PER_ID].strip() or "x"
        self._size += len(text)
        return text


CHARACTERS_PER_ID = 5
TEXT = "".join(
    (Path(json.__file__).parent.parent / name).read_text("utf-8")
    for name in ("argparse.py", "asyncio/base_events.py", "typing.py", "subprocess.py")
)


def measure_cost(arguments: argparse.Namespace) -> int:
    """Print the cost of a turn of each template at each length, and the medians; returns 0."""
    _find_support()
    lengths: list[int] = arguments.lengths
    print(
        f"{'template':42} {'messages':>8}"
        + "".join(f"{f'{length // 1000}k: turn, first, full ms':>30}" for length in lengths)
    )
    table: list[list[Cost]] = []
    for template in _pick_templates(arguments.template):
        subject = Subject(template.name)
        costs = _measure_lengths(subject, lengths)
        if isinstance(costs, str):
            print(f"{template.name:42} {costs}", flush=True)
            continue
        table.append(costs)
        cells = "".join(
            f"{cost.later_s * 1e3:>12.2f} {cost.first_s * 1e3:>8.2f} {cost.full_s * 1e3:>8.0f}" for cost in costs
        )
        few_s, many_s = (subject.measure_rendering_s(num_messages) for num_messages in (100, 400))
        steep = f"  quadratic: {many_s * 1e3:.0f} ms for 400 short messages" if many_s > max(7 * few_s, 0.015) else ""
        print(f"{template.name:42} {costs[-1].num_messages:>8}{cells}{steep}", flush=True)
    for number, length in enumerate(lengths if table else ()):
        print(_summarise([costs[number] for costs in table], length))
    return 0


def _summarise(costs: Sequence[Cost], length: int) -> str:
    def find_median(read: Callable[[Cost], float]) -> float:
        return statistics.median(map(read, costs))

    turn_ms, full_ms = find_median(lambda cost: cost.later_s) * 1e3, find_median(lambda cost: cost.full_s) * 1e3
    return (
        f"median of {len(costs)} at {find_median(lambda cost: cost.num_ids):,.0f} ids ({length:,} asked for): "
        f"turn {turn_ms:.2f} ms, full {full_ms:.0f} ms, {find_median(lambda cost: cost.full_s / cost.later_s):.0f}x; "
        f"the first of a conversation {find_median(lambda cost: cost.first_s - cost.later_s) * 1e3:+.2f} ms; "
        f"the dearest turn {max(cost.later_s for cost in costs) * 1e3:.1f} ms"
    )


def _measure_lengths(subject: Subject, lengths: Sequence[int]) -> list[Cost] | str:
    """The costs at each length, or why there are none."""
    costs: list[Cost] = []
    num_ids = 0
    for length in lengths:
        renderer = TemplateRenderer(subject.tokenizer)
        steps = subject.make_steps(length, length, 1 + NUM_LATER)
        turn_s: list[float] = []
        for step in steps:
            start = time.thread_time()
            outcome = subject.bridge(renderer, step)
            turn_s.append(time.thread_time() - start)
            if isinstance(outcome, Refusal):
                return f"{outcome.reason}: {outcome.detail[:110]}"
        full_s: list[float] = []
        for _ in range(1 if length > 10_000 else NUM_LATER):
            start = time.thread_time()
            num_ids = len(subject.render(steps[0].everything))
            full_s.append(time.thread_time() - start)
        costs.append(
            Cost(
                num_ids=num_ids,
                num_messages=len(steps[-1].everything),
                first_s=turn_s[0],
                later_s=statistics.median(turn_s[1:]),
                full_s=statistics.median(full_s),
            )
        )
    return costs


def measure_memory(arguments: argparse.Namespace) -> int:
    """Print what bridges allocate and what is kept of conversations; returns 0."""
    _find_support()
    for name in arguments.template or ("trl/qwen3", "trl/llama3_1"):
        subject = Subject(name)
        renderer = TemplateRenderer(subject.tokenizer)
        [warm, *steps] = [subject.make_steps(seed, 16_000, 1)[0] for seed in range(1 + NUM_AT_ONCE)]
        [long] = subject.make_steps("long", 128_000, 1)
        num_ids = len(subject.render(long.everything))
        subject.bridge(renderer, warm)
        gc.collect()
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        subject.bridge(renderer, long)
        _, peak = tracemalloc.get_traced_memory()
        gc.collect()
        kept_of_one = tracemalloc.get_traced_memory()[0] - before
        for step in steps:
            subject.bridge(renderer, step)
        gc.collect()
        kept = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        print(
            f"{name}: a bridge after {num_ids:,} ids allocates at most {(peak - before) / 1e6:.2f} MB; kept afterwards "
            f"{kept_of_one / 1e3:.0f} kB, and after {NUM_AT_ONCE} more conversations of 16k ids {kept / 1e3:.0f} kB"
        )
    return 0


def measure_rollouts(arguments: argparse.Namespace) -> int:
    """Print the CPU that rendering takes of 32 conversations at once, by bridges and without; returns 0."""
    _find_support()
    for name in arguments.template or ("trl/qwen3", "trl/llama3_1"):
        subject = Subject(name)
        for length in (500, 4_000):
            renderer = TemplateRenderer(subject.tokenizer)
            conversations = [subject.make_steps(seed, length, NUM_TURNS) for seed in range(NUM_AT_ONCE)]
            cpu_ms, wall_s, pause_s = asyncio.run(
                _run_at_once(renderer, conversations, lambda step: subject.bridge(renderer, step))  # noqa: B023
            )
            full_cpu_ms, full_wall_s, _ = asyncio.run(
                _run_at_once(renderer, conversations, lambda step: subject.render(step.everything))  # noqa: B023
            )
            print(
                f"{name}: {NUM_AT_ONCE} at once from {length} ids on, {NUM_TURNS} turns each: {cpu_ms:.2f} ms CPU a "
                f"turn ({wall_s:.2f} s in all, the event loop waited {pause_s * 1e3:.0f} ms at most); rendered and "
                f"tokenised whole: {full_cpu_ms:.2f} ms a turn ({full_wall_s:.2f} s in all)"
            )
    return 0


async def _run_at_once(
    renderer: TemplateRenderer, conversations: Sequence[Sequence[Step]], work: Callable[[Step], object]
) -> tuple[float, float, float]:
    """CPU milliseconds a turn, wall seconds in all, and the longest pause of the event loop."""
    pauses_s = [0.0]

    async def converse(steps: Sequence[Step]) -> None:
        for step in steps:
            await renderer.renderer_threads.run(functools.partial(work, step))

    async def watch() -> None:
        while True:
            start = time.perf_counter()
            await asyncio.sleep(0.001)
            pauses_s.append(time.perf_counter() - start - 0.001)

    start_cpu_s, start_s = time.process_time(), time.perf_counter()
    watching = asyncio.create_task(watch())
    await asyncio.gather(*map(converse, conversations))
    watching.cancel()
    cpu_s = time.process_time() - start_cpu_s
    return cpu_s / sum(map(len, conversations)) * 1e3, time.perf_counter() - start_s, max(pauses_s)


PARTS: dict[str, Callable[[argparse.Namespace], int]] = {
    "exact": count_exact,
    "generated": count_generated,
    "cost": measure_cost,
    "memory": measure_memory,
    "rollouts": measure_rollouts,
}


if __name__ == "__main__":
    sys.exit(main())
