"""Counts the bridges that are exact, refused and wrong: over generated templates, and over those of packages.

    python bench/bridges.py [--seeds 0:40] [--conversations 24] [--processes 1]
    python bench/bridges.py --shipped [--conversations 200] [--seconds 600] [--processes 1]

Generated templates (`tests/support/template_generator.py`) write more text after a turn on random conditions over what
a template can read. With `--shipped`, the chat templates that `trl` and `vllm` ship are tried, in rounds of at most
1,000 conversations with each, until there are as many as asked for or the time is over; each round has other
conversations and examines the template anew. A bridge is judged by transformers' own rendering of the whole
conversation: it is *exact* if it is the end of that, character for character and id for id, *refused* with a reason, or
*wrong*.
`unbroken audit --table FOLDER` does the same for template files.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

NUM_PER_ROUND = 1000


def main() -> int:
    """Print the counts and the wrong bridges; the exit status is 1 if there are any."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--seeds", default="0:40", help="of the generated templates: from and to (exclusive)")
    parser.add_argument("--shipped", action="store_true", help="the templates of trl and vllm")
    parser.add_argument("--conversations", type=int, help="with each template (by default 24, or 200 if --shipped)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no round after this time")
    parser.add_argument("--processes", type=int, default=1)
    arguments = parser.parse_args()
    first, _, last = arguments.seeds.partition(":")
    with ProcessPoolExecutor(arguments.processes, initializer=_find_support) as pool:
        if arguments.shipped:
            num_wrong = count_shipped(pool, arguments.conversations or 200, arguments.seconds)
        else:
            num_wrong = count_generated(pool, range(int(first), int(last)), arguments.conversations or 24)
    return 1 if num_wrong else 0


def count_generated(pool: ProcessPoolExecutor, seeds: range, num_conversations: int) -> int:
    """Try the templates of the seeds, and return the number of wrong bridges."""
    start, total, kinds = time.perf_counter(), Counter[str](), Counter[str]()
    for future in as_completed([pool.submit(try_seed, seed, num_conversations) for seed in seeds]):
        seed, condition, counts, wrong = future.result()
        total += counts
        kinds[_name_kind(counts)] += 1
        for text in wrong[:1]:
            print(f"seed {seed}: {len(wrong)} wrong, {condition}\n  {text[-600:]}", flush=True)
    print(
        f"{len(seeds)} generated templates, {num_conversations} conversations each, {time.perf_counter() - start:.0f} s"
    )
    print(f"bridges: {_list_counts(total)}")
    print(f"templates: {_list_counts(kinds)}")
    return total["wrong"]


def try_seed(seed: int, num_conversations: int) -> tuple[int, str, Counter[str], list[str]]:
    """Judge the bridges of one generated template."""
    from support.generated_runs import judge_seed

    template, counts, wrong = judge_seed(seed, num_conversations)
    return seed, template.condition, counts, wrong


def count_shipped(pool: ProcessPoolExecutor, num_conversations: int, seconds: float) -> int:
    """Try all templates in rounds, and return the number of wrong bridges."""
    _find_support()
    from support.corpus import corpus_templates

    start, deadline = time.perf_counter(), time.time() + seconds
    names = [template.name for template in corpus_templates()]
    num_rounds = -(-num_conversations // NUM_PER_ROUND)
    size = -(-num_conversations // num_rounds)
    totals, refusals = {name: Counter[str]() for name in names}, Counter[str]()
    jobs = ((name, number) for number in range(num_rounds) for name in names)
    futures = [pool.submit(try_shipped, name, number, size, deadline) for name, number in jobs]
    for future in as_completed(futures):
        name, counts, reasons, wrong = future.result()
        totals[name] += counts
        refusals += reasons
        for text in wrong[:1]:
            print(f"{name}: {len(wrong)} wrong\n  {text[-600:]}", flush=True)
    tried = [counts.total() for counts in totals.values()]
    total = sum(totals.values(), Counter[str]())
    print(
        f"{len(names)} templates, {min(tried)} to {max(tried)} conversations each, {time.perf_counter() - start:.0f} s"
    )
    print(f"bridges: {_list_counts(total)}")
    print(f"refusals: {_list_counts(refusals)}")
    return total["wrong"]


def try_shipped(
    name: str, round_number: int, num_conversations: int, deadline: float
) -> tuple[str, Counter[str], Counter[str], list[str]]:
    """Judge the bridges of one template in one round; none after the deadline."""
    from support.corpus import corpus_template
    from support.corpus_runs import run_template

    if time.time() > deadline:
        return name, Counter(), Counter(), []
    tally = run_template(corpus_template(name), num_conversations, round_number=round_number)
    return name, Counter(tally.judgements), Counter(tally.refusals), tally.wrong


def _find_support() -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))


def _name_kind(counts: Counter[str]) -> str:
    if counts["wrong"]:
        return "wrong"
    accepted = counts.total() - counts["not accepted"]
    kinds = {0: "always refused", accepted: "always exact"}
    return kinds.get(counts["exact"], "exact or refused")


def _list_counts(counts: Counter[str]) -> str:
    return ", ".join(f"{num} {name}" for name, num in counts.most_common())


if __name__ == "__main__":
    sys.exit(main())
