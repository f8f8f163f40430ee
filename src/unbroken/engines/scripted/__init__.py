"""A fake engine for tests: its completions are scripted, and it checks the prompts it gets.

    engine = ScriptedEngine([[5, 6, 2], [7, 2]])              # the first request gets 5 6 2, the second 7 2
    engine = ScriptedEngine(lambda prompt_ids: [len(prompt_ids), 2])

It samples one id per turn of the event loop, so that a request can be paused, aborted, cancelled, or get new weights in
mid-sequence, as with a real engine. It needs no torch.

`engine` is the engine, `script` has its replies, `histories` checks the prompts.
"""

from unbroken.engines.scripted.engine import ScriptedEngine
from unbroken.engines.scripted.script import Reply, Script, ScriptedReply

__all__ = ["Reply", "Script", "ScriptedEngine", "ScriptedReply"]
