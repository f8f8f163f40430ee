"""The settings of every run, a small config for each part. A recipe extends `RunConfig` with its own settings.

@dataclass(frozen=True, slots=True, kw_only=True)
class Config(RunConfig):
    output: Path = Path("runs/mine")
    loop: LoopConfig = LoopConfig(num_steps=50)
"""

from unbroken.runs.config.engine import EngineConfig, EngineKind, WeightTransport
from unbroken.runs.config.evaluation import EvaluationConfig
from unbroken.runs.config.model import Attention, LoraConfig, ModelSettings, Precision, RendererConfig
from unbroken.runs.config.outputs import CheckpointConfig, ExportConfig, RolloutLogConfig, TimelineConfig
from unbroken.runs.config.rollouts import RolloutConfig, SessionConfig
from unbroken.runs.config.run import RunConfig

__all__ = [
    "Attention",
    "CheckpointConfig",
    "EngineConfig",
    "EngineKind",
    "EvaluationConfig",
    "ExportConfig",
    "LoraConfig",
    "ModelSettings",
    "Precision",
    "RendererConfig",
    "RolloutConfig",
    "RolloutLogConfig",
    "RunConfig",
    "SessionConfig",
    "TimelineConfig",
    "WeightTransport",
]
