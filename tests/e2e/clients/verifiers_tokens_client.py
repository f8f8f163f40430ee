"""Run a tool environment of verifiers 0.1 with its token client against a server: `verifiers_tokens_client.py URL`."""

import asyncio
import os
import sys
from typing import Any

os.environ["PRIME_API_KEY"] = "none"

import verifiers as vf
from agent_task import QUESTION, add, report
from datasets import Dataset
from verifiers.types import ClientConfig

BADLY = f"{QUESTION} Call it badly."
"""To this the server's model answers with a call that cannot be parsed."""


def score(completion: Any, **_: Any) -> float:
    return float("9" in str(completion[-1].content))


rows = Dataset.from_list([{"question": question, "answer": "9"} for question in (QUESTION, BADLY)])
env = vf.ToolEnv(dataset=rows, tools=[add], max_turns=5, rubric=vf.Rubric(funcs=[score]))
config = ClientConfig(client_type="openai_chat_completions_token", api_base_url=f"{sys.argv[1]}/v1", max_retries=0)


def play(row: int) -> Any:
    generated = env.generate(
        env.get_dataset().select([row]),
        client=config,
        model="tiny",
        sampling_args={"max_tokens": 300},
        state_columns=["trajectory"],
    )
    return asyncio.run(generated)["outputs"][0]


output = play(0)
turns = [
    [step["tokens"]["prompt_ids"], step["tokens"]["completion_ids"], len(step["tokens"]["completion_logprobs"])]
    for step in output["trajectory"]
]
badly = play(1)
report(
    vf.__version__,
    output["completion"][-1]["content"],
    turns=turns,
    reward=output["reward"],
    errors=[output.get("error"), badly.get("error")],
    malformed=badly["completion"][-1]["content"],
)
