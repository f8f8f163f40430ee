from enum import Enum


class TrialEvent(Enum):
    AGENT_START = "agent-start"
