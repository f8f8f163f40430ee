"""Run a tool environment of verifiers 0.1 with its token client against a server: `verifiers_tokens_client.py URL`."""

import asyncio
import os
import sys

os.environ["PRIME_API_KEY"] = "none"

import verifiers as vf
from agent_task import QUESTION, add, report
from datasets import Dataset
from verifiers.types import ClientConfig

env = vf.ToolEnv(
    dataset=Dataset.from_list([{"question": QUESTION, "answer": "9"}] * 2), tools=[add], max_turns=5,
    rubric=vf.Rubric(funcs=[lambda completion, **_: float("9" in str(completion[-1].content))]),
)  # fmt: skip
config = ClientConfig(client_type="openai_chat_completions_token", api_base_url=f"{sys.argv[1]}/v1", max_retries=0)
found = asyncio.run(
    env.generate(
        env.get_dataset().select(range(1)), client=config, model="tiny", sampling_args={"max_tokens": 300},
        state_columns=["trajectory"],
    )
)  # fmt: skip
output = found["outputs"][0]
turns = [
    [step["tokens"]["prompt_ids"], step["tokens"]["completion_ids"], len(step["tokens"]["completion_logprobs"])]
    for step in output["trajectory"]
]
report(
    vf.__version__,
    output["completion"][-1]["content"],
    turns=turns,
    reward=output["reward"],
    error=str(output.get("error")),
)
