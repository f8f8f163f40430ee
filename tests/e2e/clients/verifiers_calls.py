"""Play an environment of verifiers in a session over a scripted engine that calls its tool, then answers:
`verifiers_calls.py NAME ARGUMENTS CALL ANSWER FOLDER`. Prints the messages, and whether the row has exactly the
sampled ids.
"""

import asyncio
import json
import sys
from pathlib import Path

from support.servers import encode
from support.verifiers_attempts import sample
from unbroken.ledger.tree import export_samples

NAME, ARGUMENTS, CALL, ANSWER, FOLDER = sys.argv[1:]
group, _ = asyncio.run(sample(Path(FOLDER), CALL, ANSWER, name=NAME, **json.loads(ARGUMENTS)))
(trajectory,) = group.trajectories
rows = export_samples(trajectory.tree, 1.0)
print(
    json.dumps(
        {
            "error": repr(trajectory.error),
            "messages": [[message["role"], message["content"]] for message in trajectory.messages],
            "metrics": dict(trajectory.reward_parts),
            "is_exact": [row.token_ids[row.loss_mask].tolist() for row in rows] == [encode(CALL) + encode(ANSWER)],
        }
    )
)
