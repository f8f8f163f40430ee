"""unbroken: token-in, token-out rollouts and RL training for language models.

The trainer trains on exactly the ids that were sampled. The names in `__all__` are public. Each is imported at its
first use, so `import unbroken` loads nothing, and neither torch nor vllm need be installed.
"""

TYPE_CHECKING = False  # as in `typing`, which is not loaded here
if TYPE_CHECKING:
    from unbroken.client import AsyncClient, Client
    from unbroken.engines.http import HttpEngine
    from unbroken.engines.transformers import TransformersEngine
    from unbroken.engines.vllm import VllmEngine
    from unbroken.errors import UnbrokenError
    from unbroken.fitting import FitResult, fit
    from unbroken.rendering.loader import load_renderer
    from unbroken.rendering.template import TemplateRenderer
    from unbroken.rollout.env import Continue, Done, Env, EnvStart, Outcome, Reply, Rewrite
    from unbroken.rollout.limits import Limits
    from unbroken.rollout.runner import run_group, run_rollout
    from unbroken.rollout.tool_env import ToolEnv
    from unbroken.rollout.tools import tool
    from unbroken.rollout.trajectory import Trajectory, TrajectoryGroup
    from unbroken.training.config import LoopConfig, TrainerConfig
    from unbroken.training.loop import open_steps
    from unbroken.training.objective.online_dpo import OnlineDpo
    from unbroken.training.objective.policy_gradient import PolicyGradient
    from unbroken.training.trainer import Trainer
    from unbroken.types import SamplingParams

__version__ = "0.1.0"

__all__ = [
    "AsyncClient",
    "Client",
    "Continue",
    "Done",
    "Env",
    "EnvStart",
    "FitResult",
    "HttpEngine",
    "Limits",
    "LoopConfig",
    "OnlineDpo",
    "Outcome",
    "PolicyGradient",
    "Reply",
    "Rewrite",
    "SamplingParams",
    "TemplateRenderer",
    "ToolEnv",
    "Trainer",
    "TrainerConfig",
    "Trajectory",
    "TrajectoryGroup",
    "TransformersEngine",
    "UnbrokenError",
    "VllmEngine",
    "fit",
    "load_renderer",
    "open_steps",
    "run_group",
    "run_rollout",
    "tool",
]

_MODULES = {
    "unbroken.client": ("AsyncClient", "Client"),
    "unbroken.engines.http": ("HttpEngine",),
    "unbroken.engines.transformers": ("TransformersEngine",),
    "unbroken.engines.vllm": ("VllmEngine",),
    "unbroken.errors": ("UnbrokenError",),
    "unbroken.fitting": ("FitResult", "fit"),
    "unbroken.rendering.loader": ("load_renderer",),
    "unbroken.rendering.template": ("TemplateRenderer",),
    "unbroken.rollout.env": ("Continue", "Done", "Env", "EnvStart", "Outcome", "Reply", "Rewrite"),
    "unbroken.rollout.limits": ("Limits",),
    "unbroken.rollout.runner": ("run_group", "run_rollout"),
    "unbroken.rollout.tool_env": ("ToolEnv",),
    "unbroken.rollout.tools": ("tool",),
    "unbroken.rollout.trajectory": ("Trajectory", "TrajectoryGroup"),
    "unbroken.training.config": ("LoopConfig", "TrainerConfig"),
    "unbroken.training.loop": ("open_steps",),
    "unbroken.training.objective.online_dpo": ("OnlineDpo",),
    "unbroken.training.objective.policy_gradient": ("PolicyGradient",),
    "unbroken.training.trainer": ("Trainer",),
    "unbroken.types": ("SamplingParams",),
}

_EXTRAS = {
    "unbroken.client": "client",
    "unbroken.engines.http": "client",
    "unbroken.engines.transformers": "train",
    "unbroken.engines.vllm": "vllm",
    "unbroken.fitting": "train",
    "unbroken.training.loop": "train",
    "unbroken.training.objective.online_dpo": "train",
    "unbroken.training.objective.policy_gradient": "train",
    "unbroken.training.trainer": "train",
}
"""The extra that installs a module's dependencies."""

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import a public name at its first use.

        Raises:
            AttributeError: the package has no such name.
            ModuleNotFoundError: a dependency is not installed; the message names the extra that installs it.
        """
        module = next((module for module, names in _MODULES.items() if name in names), None)
        if module is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import importlib

        try:
            value = getattr(importlib.import_module(module), name)
        except ModuleNotFoundError as error:
            missing = error.name or ""
            if missing.startswith("unbroken") or module not in _EXTRAS:
                raise
            from unbroken.errors import install_command

            message = f"unbroken.{name} needs {missing}, which is not installed: {install_command(_EXTRAS[module])}"
            raise ModuleNotFoundError(message, name=missing) from error
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
