"""The settings of every run, a small config for each part. A recipe extends `RunConfig` with its own settings.

@dataclass(frozen=True, slots=True, kw_only=True)
class Config(RunConfig):
    output: Path = Path("runs/mine")
    loop: LoopConfig = LoopConfig(num_steps=50)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, final

from unbroken.engines.transformers import TransformersEngineConfig
from unbroken.errors import InvalidInputError
from unbroken.rendering.base import HistoryPolicy
from unbroken.rollout.limits import Limits
from unbroken.rollout.policies import TAKE_TURNS, PoliciesConfig
from unbroken.runs.algorithms import Algorithm, Pairing, make_objective
from unbroken.runs.profiler import parse_steps
from unbroken.runs.python_files import DataName, FunctionName, ModelName
from unbroken.training.config import LoopConfig, LoraUpdates, TrackerConfig, TrainerConfig
from unbroken.training.loss_config import OverlongConfig
from unbroken.types import InFlight, Numerics, SamplingParams
from unbroken.untrusted import MAX_KEYS_BYTES, read_text

if TYPE_CHECKING:
    from unbroken.training.objective.online_dpo import OnlineDpo
    from unbroken.training.objective.policy_gradient import PolicyGradient


class EngineKind(StrEnum):
    """Where rollouts are sampled."""

    EMBEDDED = "embedded"
    """The transformers engine, in the trainer's process, on a copy of the model."""
    COLOCATED = "colocated"
    """vLLM, started by each trainer process; it sleeps during each step, which gets its GPU memory."""
    STARTED = "started"
    """`unbroken serve` on the model, in its own process, started and ended with the run."""
    SERVER = "server"
    """Servers that run already, at `urls`, or those that `urls_file` lists."""


class WeightTransport(StrEnum):
    """How servers get new weights."""

    FILES = "files"
    """Through files in a folder that trainer and servers share."""
    BROADCAST = "broadcast"
    """From the trainer to all workers at once, over NCCL or gloo."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Where rollouts are sampled, and how new weights get there."""

    kind: EngineKind = EngineKind.EMBEDDED
    embedded: TransformersEngineConfig = field(default_factory=TransformersEngineConfig)
    options: tuple[str, ...] = ()
    """For colocated: vLLM's, e.g. ["--gpu-memory-utilization", "0.5", "--max-model-len", "2048"]. For started: those of
    `unbroken serve`, e.g. ["--engine", "vllm", "--max-model-len", "2048"]."""
    processes_per_engine: int = 1
    """For colocated: trainer processes that share one vLLM, which is tensor-parallel over their GPUs. With 1, each has
    its own."""
    urls: tuple[str, ...] = ()
    """For server: the servers' addresses."""
    urls_file: Path | None = None
    """For server, instead of urls: a file with one address a line, read again during the run. A server that is
    added is used once it has the newest weights; one that is removed, or does not answer, is left out."""
    api_key_file: Path | None = None
    """A file with the servers' API key, if they need one."""
    wait_s: float = 600.0
    """How long to wait at the start for servers that do not answer yet, or for the started one to serve; later,
    `loop.outages` applies. A server gets as long, and at least 600 s, to load new weights. Raise it for models that
    take longer to load."""
    transport: WeightTransport = WeightTransport.FILES
    weights_dir: Path | None = None
    """For server with files: the folder that the servers were started with as --weights-dir."""
    versions_to: str | None = None
    """For server with files, instead of weights_dir: a store for versions of the weights, such as s3://bucket/run, that
    the servers were started with as --versions-from. Nothing else may write there."""
    in_flight: InFlight = InFlight.PAUSE
    """How requests in flight get new weights, with loop.max_staleness."""
    reuse_kv: bool = False
    """Whether requests in flight keep the keys and values of older weights; otherwise they are computed again. With
    true, an id depends on weights older than its version says."""

    def __post_init__(self) -> None:
        self._check_urls()
        self._check_weights()
        if not self.wait_s >= 0:
            raise InvalidInputError(f"wait_s must be >= 0, got {self.wait_s}")
        if self.options and self.kind not in (EngineKind.COLOCATED, EngineKind.STARTED):
            raise InvalidInputError(f"options must be left out with kind {self.kind}, got {self.options}")
        if self.processes_per_engine < 1:
            raise InvalidInputError(f"processes_per_engine must be >= 1, got {self.processes_per_engine}")
        if self.processes_per_engine > 1 and self.kind is not EngineKind.COLOCATED:
            raise InvalidInputError(
                f"processes_per_engine must be 1 with kind {self.kind}, got {self.processes_per_engine}"
            )

    def _check_urls(self) -> None:
        is_server = self.kind is EngineKind.SERVER
        if is_server != (bool(self.urls) or self.urls_file is not None):
            rest = (
                "`unbroken serve MODEL` starts one, whose address is given here"
                if is_server
                else "kind server asks these servers"
            )
            raise InvalidInputError(
                f"urls must be given exactly with kind server, got {self.urls} with {self.kind}: {rest}"
            )
        if self.urls and self.urls_file is not None:
            raise InvalidInputError(f"urls must be left out with urls_file, got {self.urls} and {self.urls_file}")
        if self.urls_file is not None and self.transport is not WeightTransport.FILES:
            raise InvalidInputError(
                f"transport must be files with urls_file, got {self.transport}: a server that comes reads the newest "
                "version from the folder"
            )

    @property
    def publish_timeout_s(self) -> float:
        """How long a server may take to load new weights; after that it counts as failed. The same disk and network
        gave it the first weights within `wait_s`.
        """
        return max(self.wait_s, 600.0)

    @property
    def starts_vllm(self) -> bool:
        """Whether a run with this engine starts vLLM."""
        options = self.options
        kind = next((options[k + 1] for k, option in enumerate(options[:-1]) if option == "--engine"), "auto")
        serves_vllm = kind == "vllm" or (kind == "auto" and find_spec("vllm") is not None)
        return self.kind is EngineKind.COLOCATED or (self.kind is EngineKind.STARTED and serves_vllm)

    def _check_weights(self) -> None:
        if self.weights_dir is not None and self.versions_to is not None:
            raise InvalidInputError(
                f"weights_dir must be left out with versions_to, got {self.weights_dir} and {self.versions_to}"
            )
        if self.versions_to is not None and "://" not in self.versions_to:
            raise InvalidInputError(f"versions_to must be a URL such as s3://bucket/run, got {self.versions_to!r}")
        has_files = self.kind is EngineKind.SERVER and self.transport is WeightTransport.FILES
        if has_files != bool(self.weights_dir or self.versions_to):
            raise InvalidInputError(
                f"weights_dir must be given exactly with kind server and transport files, got {self.weights_dir} with "
                f"{self.kind} and {self.transport}: it is the folder of `unbroken serve --weights-dir`; or give "
                "versions_to, the store of --versions-from"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """LoRA adapters, which are trained instead of the whole model; `trainer.lora_updates` is what engines get."""

    rank: int = 16
    """Rank of the adapters. Raise it where a long run stops learning before a run of the whole model does."""
    alpha: float = 32.0
    """The adapters are scaled by alpha / rank. Change it with the rank, so that steps stay as large."""
    modules: tuple[str, ...] = ()
    """Names of the modules to adapt, such as q_proj,v_proj; empty: all linear layers. Name them where
    a server cannot serve adapters of all."""

    def __post_init__(self) -> None:
        if self.rank < 1 or not self.alpha > 0:
            raise InvalidInputError(f"rank must be >= 1 and alpha > 0, got {self.rank} and {self.alpha}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherConfig:
    """Other models, which score what the policy samples (docs/teachers.md); `trainer.teacher_weight` weighs them."""

    models: tuple[ModelName, ...]
    """Models with the policy's tokenizer: a folder, a name on the hub, the folder of a LoRA adapter of the policy's
    first model, or the address of a server (`unbroken serve`, or vLLM). Of several, each row names its own."""
    column: str | None = None
    """With several models: the column that names a row's teacher, by the last part of its folder's path, or by the
    server's address; null for none."""
    prompt: str | None = None
    """The column with the prompt that the teacher gets instead of the policy's first one, as text or messages: with a
    hint, or the answer; null for the policy's own. The images of the policy's prompt stay, in their order. Give it
    where the policy shall do without the hint later."""
    top_k: int = 0
    """Learn the teacher's distribution over its `top_k` most likely ids and all others together, instead of only how
    likely it finds the sampled one: for a teacher whose choices the policy seldom samples. 0: the sampled ids."""
    api_key_file: Path | None = None
    """A file with the API key of teachers at servers, if they need one."""

    def __post_init__(self) -> None:
        if not self.models or len(set(self.names)) < len(self.models):
            raise InvalidInputError(
                f"models must be models whose paths end in different names, got {[str(each) for each in self.models]}"
            )
        if (self.column is not None) != (len(self.models) > 1):
            raise InvalidInputError(
                f"column must be given exactly with several models, got {self.column!r} with {len(self.models)}"
            )
        if self.top_k < 0:
            raise InvalidInputError(f"top_k must be >= 0, got {self.top_k}")
        if self.api_key_file is not None and not any(map(is_address, self.models)):
            raise InvalidInputError("api_key_file must be left out without a server among models")

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each model, as the column has it."""
        return tuple(
            each.partition("://")[2].rstrip("/") if is_address(each) else Path(each).name for each in self.models
        )

    @property
    def needs_all_ids(self) -> bool:
        """Whether the policy must sample from the whole vocabulary, because the teacher does not know what was kept."""
        return self.prompt is not None or self.top_k > 0 or any(map(is_address, self.models))


def is_address(model: str) -> bool:
    """Whether a teacher is at a server."""
    return model.startswith(("http://", "https://"))


class Precision(StrEnum):
    """A type of the model's layers."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Attention(StrEnum):
    """An implementation of attention in transformers."""

    EAGER = "eager"
    SDPA = "sdpa"
    FLEX = "flex_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """How the model is loaded, for the policy and its reference alike."""

    attn_implementation: Attention | None = None
    """None: transformers' choice (sdpa), and eager for a model with soft caps or sinks, which sdpa leaves out.
    flex_attention is compiled on a GPU; the embedded engine then has eager."""
    dtype: Precision | None = None
    """The type of the weights. Those that are trained are float32; with lora, bfloat16 is for those below the adapters,
    which take half the memory so. None: bfloat16 with lora and precision = bfloat16, which rounds them in each product
    anyway; otherwise float32."""
    revision: str | None = None
    """The branch, tag or commit of a model on the hub, for its tokenizer and the started engine too."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further keyword arguments of from_pretrained; with the embedded engine, fields of the model's config too."""

    def __post_init__(self) -> None:
        if refused := sorted(_NOT_KWARGS.intersection(self.kwargs)):
            raise InvalidInputError(
                f"kwargs must be without {', '.join(refused)}: model_settings has its own fields for some, the "
                "trainer places the model and trains its weights as they are, and models are those that transformers "
                f"has, got {dict(self.kwargs)}"
            )


_NOT_KWARGS = frozenset(
    {
        "attn_implementation",
        "config",
        "device_map",
        "dtype",
        "quantization_config",
        "revision",
        "torch_dtype",
        "tp_plan",
        "trust_remote_code",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RendererConfig:
    """How messages become token ids; see docs/renderers.md."""

    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template, e.g. {enable_thinking = false}."""
    history: HistoryPolicy = HistoryPolicy.EXACT
    parser: str | None = None
    """The format of completions, instead of the one found in the template."""
    image_settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the model's image processor, e.g. {max_pixels = 200704}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationConfig:
    """Evaluations before the first step, after the last, and by choice between, in `evaluation.jsonl`."""

    num_problems: int = 0
    """Problems that are evaluated, the same each time; 0 for no evaluation. They are rows that train, unless there are
    `evaluation_sets`, of which each may have a number of its own."""
    num_samples: int = 1
    """Rollouts of each problem, for pass@k and a smaller error."""
    every: int = 0
    """Steps between two evaluations; 0: only before the first step and after the last. With it, `best` is the model
    of the best evaluation after at least one step."""
    best_set: str | None = None
    """The set whose mean reward decides which model is best; none: the first."""
    pass_reward: float = 1.0
    """A rollout passes, for pass@k, if its reward is at least this."""
    sampling: SamplingParams | None = None
    """How to sample in evaluations, without restriction; if left out, as in `rollouts`."""

    def __post_init__(self) -> None:
        for name, least in (("num_problems", 0), ("num_samples", 1), ("every", 0)):
            if (value := getattr(self, name)) < least:
                raise InvalidInputError(f"{name} must be >= {least}, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints, from which the same command continues the run."""

    every: int = 20
    """Steps between two checkpoints. The first step and the last have one too. Lower it where a step takes so long that
    losing some of them hurts."""
    every_s: float | None = 600.0
    """Seconds after which there is one all the same, if a step ends then; none: never. Raise it where a checkpoint
    takes minutes to write."""
    num_kept: int = 2
    """How many of the newest checkpoints are kept. 1 where the disk is small: with AdamW each has three times the
    weights in float32."""

    def __post_init__(self) -> None:
        for name in ("every", "num_kept"):
            if (value := getattr(self, name)) < 1:
                raise InvalidInputError(f"{name} must be >= 1, got {value}")
        if self.every_s is not None and not self.every_s > 0:
            raise InvalidInputError(f"every_s must be > 0 or none, got {self.every_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportConfig:
    """The models that come out, for transformers and vLLM: `final` after the last step, and more by choice."""

    every: int = 0
    """Steps between two models in `models/step-N`; 0 for none."""
    num_kept: int | None = None
    """How many of the newest of them are kept; none: all."""
    merged: bool = False
    """With LoRA: whole models, with the adapters merged. Otherwise the adapters alone, as PEFT writes them."""
    dtype: Precision | None = None
    """The type of the weights in the files; none: that of the model's own files (adapters alone: float32). Training is
    in float32, which is exact."""
    push_to_hub: str | None = None
    """A repository on the Hugging Face Hub that gets the final model, such as NAME/MODEL; it is created if missing."""
    private: bool = False
    """Whether a repository that is created is private."""

    def __post_init__(self) -> None:
        if self.every < 0:
            raise InvalidInputError(f"every must be >= 0, got {self.every}")
        if self.num_kept is not None and self.num_kept < 1:
            raise InvalidInputError(f"num_kept must be >= 1 or none, got {self.num_kept}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutLogConfig:
    """The rollouts in `rollouts/`: tokens, logprobs of both sides, messages, rewards (docs/rollouts.md)."""

    groups: int | None = None
    """Groups of a step that each process keeps at most, evenly spread; none: all that `max_mb` has room for; 0: no
    files."""
    max_mb: float | None = 1000.0
    """Maximum size of all files together, in 10^6 bytes, spread over the steps; none: no maximum. A step that needs
    more keeps at least one group: first those whose rewards differ, failures and extreme rewards."""
    scored_groups: int | None = 1
    """Groups of those that are kept which have the trainer's logprobs, first those whose rewards differ; none: all. It
    costs a forward pass over them in each step. Raise it to see where sampler and trainer differ."""

    def __post_init__(self) -> None:
        if self.groups is not None and self.groups < 0:
            raise InvalidInputError(f"groups must be >= 0 or none, got {self.groups}")
        if self.scored_groups is not None and self.scored_groups < 0:
            raise InvalidInputError(f"scored_groups must be >= 0 or none, got {self.scored_groups}")
        if self.max_mb is not None and not self.max_mb > 0:
            raise InvalidInputError(f"max_mb must be > 0 or none, got {self.max_mb}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """The rollouts of one step."""

    elsewhere: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("num_groups", "groups_per_step", "num_problems", "num_prompts", "prompts_per_step", "train_batch_size"),
            "its name is problems_per_step",
        ),
        **dict.fromkeys(("num_generations", "num_samples", "n"), "its name is group_size"),
    }
    """Other names of fields: by its spelling, num_groups was answered with group_size, which is something else."""

    problems_per_step: int = 16
    """Groups in a step, over all processes. Raise it where the gradient is too noisy to learn from."""
    group_size: int = 8
    """Trajectories of one problem, whose rewards are compared. Raise it where most groups have equal rewards; 1 only
    with reinforce_plus_plus, which compares those of all problems."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """All of them may change the distribution: the trainer's is the same. Of top-k, top-p, min-p and a structured
    output the engine says which ids were kept; the trainer applies the others to its own logits."""
    limits: Limits = field(default_factory=Limits)
    tools_in_messages: bool = False
    """Whether the tasks' own messages describe their tools, so that the chat template need not show them. Otherwise
    a run with tools and a template that leaves them out is refused: the model would not know that there are any."""
    samplers: int = 0
    """Processes that sample for each trainer process, started and replaced by it; 0: it samples itself. The Python of
    rollouts (environments, tools, rewards, templates) then takes no time from the trainer's. Each opens the recipe
    again. For engine.kind started and server."""
    listen: str | None = None
    """HOST:PORT of this machine, at which samplers of other machines join (`unbroken sampler`) and leave at any time;
    rank K listens at PORT + K. For engine.kind server."""
    key_file: Path | None = None
    """With listen: a file with a secret that these samplers have too. Who has it can run code in this process."""

    def __post_init__(self) -> None:
        if self.problems_per_step < 1:
            raise InvalidInputError(f"problems_per_step must be >= 1, got {self.problems_per_step}")
        if self.group_size < 1:
            raise InvalidInputError(f"group_size must be >= 1, got {self.group_size}")
        if self.samplers < 0:
            raise InvalidInputError(f"samplers must be >= 0, got {self.samplers}")
        if (self.listen is None) != (self.key_file is None):
            raise InvalidInputError(f"key_file must be given exactly with listen, got {self.key_file}, {self.listen}")
        if self.listen is not None:
            parse_address(self.listen, field="listen")
        if self.sampling.min_tokens >= self.sampling.max_tokens:
            raise InvalidInputError(
                f"sampling.min_tokens must be < sampling.max_tokens, {self.sampling.max_tokens}, got "
                f"{self.sampling.min_tokens}: no turn could end"
            )
        if self.sampling.structured_output is not None and self.sampling.temperature == 0:
            raise InvalidInputError(
                "sampling.structured_output must be left out at sampling.temperature 0: engines say which ids were "
                "kept only where ids are drawn"
            )

    @property
    def has_samplers(self) -> bool:
        """Whether other processes sample."""
        return self.samplers > 0 or self.listen is not None

    def check_engine(self, kind: EngineKind) -> None:
        """Raise `InvalidInputError` if samplers would not reach the engine."""
        if self.samplers and kind not in (EngineKind.STARTED, EngineKind.SERVER):
            raise InvalidInputError(
                f"rollouts.samplers must be 0 with engine.kind {kind}, whose engine is in the trainer's process, got "
                f"{self.samplers}: take started or server"
            )
        if self.sampling.structured_output is not None and kind is EngineKind.EMBEDDED:
            raise InvalidInputError(
                f"rollouts.sampling.structured_output must be left out with engine.kind {kind}, which has none: take "
                "another, whose engine is vLLM"
            )
        if self.listen is not None and kind is not EngineKind.SERVER:
            raise InvalidInputError(
                f"rollouts.listen must be left out with engine.kind {kind}, whose engine other machines do not reach, "
                f"got {self.listen}: take server"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionConfig:
    """The gateway that agents talk to (docs/gateway.md)."""

    url: str | None = None
    """Of a gateway that runs already, over the run's servers; none: one in this process, over the run's engine."""
    api_key_file: Path | None = None
    """A file with the key of the gateway at `url`, if it needs one."""
    store: str | None = None
    """Where the gateway in this process keeps its sessions, a folder or a postgresql:// URL; none: OUTPUT/sessions."""
    host: str = "127.0.0.1"
    """The address at which agents reach the gateway in this process."""

    def __post_init__(self) -> None:
        if self.url is not None and self.store is not None:
            raise InvalidInputError("sessions.store must be left out with sessions.url, got both")
        if self.url is None and self.api_key_file is not None:
            raise InvalidInputError("sessions.api_key_file must be left out without sessions.url")


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStartConfig:
    """Supervised rows: the first steps of the run, and beside the rollouts of the others (docs/supervised.md)."""

    elsewhere: ClassVar[Mapping[str, str]] = {
        "batch_size": "a step has rollouts.problems_per_step conversations",
        "epochs": "give steps: an epoch has as many as there are conversations, divided by rollouts.problems_per_step",
    }

    data: DataName
    """A file with a conversation in each row (`messages`, and `tools` if it has some), or with rows that `unbroken
    export` wrote; or the name of such a data set on the hub."""
    steps: int = 0
    """Supervised steps that the run begins with, which loop.num_steps counts too. As few as make some rollouts earn a
    reward: what comes after learns from those, and forgets less."""
    learning_rate: float | None = None
    """That of these steps, without a schedule; None: the optimizer's. Raise it where the supervised loss hardly falls:
    rows of a teacher bear ten times the rate of rollouts."""
    weight: float = 0.0
    """The weight of their loss in each step after these, which has as many other conversations; 0: none. Raise it where
    the policy unlearns what the rows show."""

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise InvalidInputError(f"steps must be >= 0, got {self.steps}")
        if self.learning_rate is not None and not 0 < self.learning_rate < float("inf"):
            raise InvalidInputError(f"learning_rate must be finite and > 0, or none, got {self.learning_rate}")
        if not 0 <= self.weight < float("inf"):
            raise InvalidInputError(f"weight must be finite and >= 0, got {self.weight}")
        if self.steps == 0 and self.weight == 0:
            raise InvalidInputError("steps must be >= 1, or weight above 0, got neither: the rows would not be used")
        if self.steps == 0 and self.learning_rate is not None:
            raise InvalidInputError(f"learning_rate must be left out with steps 0, got {self.learning_rate}")


DAPO_REPLACEMENTS = 3.0
"""`loop.max_replacements` with algorithm dapo."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The settings of every run."""

    elsewhere: ClassVar[Mapping[str, str]] = {
        "preflight": "it is no setting of a run: give the command --preflight false"
    }

    output: Path
    """Folder of the run: metrics, evaluations, checkpoints, models. The same command continues the run in it."""
    seed: int = 0
    """Seed of the problems, their order, the sampling, and how rows are dealt out to minibatches. Change it to repeat a
    run and see how far results differ by chance."""
    algorithm: Algorithm = Algorithm.GRPO
    advantages: FunctionName | None = None
    """Instead of the algorithm's: grpo, dr_grpo, rloo, batch_scaled_grpo, reinforce_plus_plus,
    reinforce_plus_plus_baseline, gdpo, zero, turn_grpo, turn_returns, or your own, written module:function or
    file.py:function."""
    loss: FunctionName | None = None
    """Instead of the algorithm's: clipped, gspo, gspo_token, cispo, sapo, or your own, written as `advantages`."""
    pairs: Pairing = Pairing.OUTSIDE_IN
    """For online_dpo."""
    curriculum: FunctionName | None = None
    """What makes the curriculum, which chooses the next problem by the results so far: module:function or
    file.py:function (docs/choosing-problems.md). None: problems in their order."""
    precision: Precision = Precision.FLOAT32
    """The type in which the model's layers are computed; weights, logits and losses are always float32."""
    model_settings: ModelSettings = field(default_factory=ModelSettings)
    lora: LoraConfig | None = None
    policies: PoliciesConfig | None = None
    teacher: TeacherConfig | None = None
    images: bool | None = None
    """Whether the model takes images, in prompts and from tools; none: if prompts of the data have images, or if
    transformers has no text model of its kind."""
    renderer: RendererConfig = field(default_factory=RendererConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    rollouts: RolloutConfig = field(default_factory=RolloutConfig)
    sessions: SessionConfig = field(default_factory=SessionConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    warm_start: WarmStartConfig | None = None
    loop: LoopConfig
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    rollout_log: RolloutLogConfig = field(default_factory=RolloutLogConfig)
    log_completions: int = 0
    """Completions of each step that are shown in a table, and logged to trackers that have tables. All of them are in
    `unbroken view`."""
    trackers: TrackerConfig = field(default_factory=TrackerConfig)
    profile_steps: str | None = None
    """Steps to profile with torch.profiler, FIRST:STOP: 3:5 for the steps 3 and 4; a trace in `profiles`."""

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise InvalidInputError(f"seed must be >= 0, got {self.seed}")
        if self.log_completions < 0:
            raise InvalidInputError(f"log_completions must be >= 0, got {self.log_completions}")
        if (steps := parse_steps(self.profile_steps)) and steps[0] >= self.loop.num_steps:
            raise InvalidInputError(
                f"profile_steps must begin before step {self.loop.num_steps} (loop.num_steps), got {self.profile_steps}"
            )
        self._check_parts()
        self._check_lora()
        if self.trainer.numerics is Numerics.EXACT:
            self._check_exact()
        self._check_objective()

    # Final: the configuration of a recipe that had a method of the same name would leave the check out.
    @final
    def _check_parts(self) -> None:
        """Raise `InvalidInputError` for settings of two parts that do not go together."""
        if self.trainer.dpo is not None and self.algorithm is not Algorithm.ONLINE_DPO:
            raise InvalidInputError(
                f"trainer.dpo must be left out with algorithm {self.algorithm}, got {self.trainer.dpo}"
            )
        if self.loop.max_staleness > 0 and self.engine.kind is EngineKind.COLOCATED:
            raise InvalidInputError(
                "loop.max_staleness must be 0 with engine.kind colocated, whose GPU trains a step alone, got "
                f"{self.loop.max_staleness}: take started or server, on GPUs of their own"
            )
        self.rollouts.check_engine(self.engine.kind)
        self._check_teacher()
        if self.policies is not None:
            self._check_policies()
        if self.warm_start is not None and self.warm_start.steps > self.loop.num_steps:
            raise InvalidInputError(
                f"warm_start.steps must be at most {self.loop.num_steps}, all steps of the run (loop.num_steps), got "
                f"{self.warm_start.steps}"
            )

    @final
    def _check_teacher(self) -> None:
        """Raise `InvalidInputError` for a teacher that is missing, or cannot score what the run samples."""
        if self.teacher is None:
            if self.algorithm is Algorithm.DISTILLATION:
                raise InvalidInputError("teacher.models must be given with algorithm distillation, got none")
            if self.trainer.teacher_weight is not None:
                raise InvalidInputError(
                    f"trainer.teacher_weight must be left out without teacher.models, got {self.trainer.teacher_weight}"
                )
            return
        rules: Sequence[tuple[str, bool, str]] = (
            (
                "teacher.models",
                bool(set(self.teacher.models) & set(self.engine.urls)),
                "at other servers than engine.urls, which get the policy's weights",
            ),
            (
                "trainer.teacher_weight",
                self.algorithm is Algorithm.DISTILLATION and self.trainer.teacher_weight == 0,
                "above 0 with algorithm distillation, which learns from nothing else",
            ),
            (
                "rollouts.sampling",
                not self.rollouts.sampling.is_plain and self.teacher.needs_all_ids,
                "without parameters that cut or change logits with teacher.prompt, teacher.top_k or a teacher at a "
                "server, which do not know them",
            ),
        )
        for name, is_refused, rule in rules:
            if is_refused:
                raise InvalidInputError(f"{name} must be {rule}, got {attrgetter(name)(self)}")

    @final
    def _check_policies(self) -> None:
        """Raise `InvalidInputError` for what several policies cannot have yet."""
        kept: Mapping[str, tuple[bool, str]] = {
            "lora": (self.lora is not None, "given with policies, each of which is an adapter"),
            "engine.reuse_kv": (not self.engine.reuse_kv, "false"),
            "algorithm": (self.algorithm is not Algorithm.ONLINE_DPO, "no online_dpo, whose pairs are of one policy"),
            "loop.max_staleness": (
                self.loop.max_staleness == 0,
                "0: a rollout that begins before an update may go on with the base, or with copies that the update "
                "drops",
            ),
            "loop.max_replacements": (
                not self.chosen_loop.replaces_groups,
                "0 (and algorithm dapo has 3 by default): a group without variance for one policy may have some for "
                "another",
            ),
            "rollouts.samplers": (not self.rollouts.has_samplers, "0, and rollouts.listen left out"),
            "teacher": (self.teacher is None, "left out"),
            "warm_start": (self.warm_start is None, "left out: no row says whose it is"),
            "images": (not self.images, "false"),
            "trainer.numerics": (
                self.trainer.numerics is not Numerics.EXACT or self._is_merged_by_engine,
                "fast, or auto, with vLLM, whose sum of adapters and weights has other bits than the trainer's",
            ),
            "trainer.parallel": (
                self.trainer.parallel.num_processes == self.trainer.parallel.sequence == 1,
                f"left out: {TAKE_TURNS}",
            ),
            "trainer.compile": (not self.trainer.compile, "false: the adapter changes between two passes"),
            "trainer.routing_replay": (not self.trainer.routing_replay, "false"),
            "trainer.reference_sync": (self.trainer.reference_sync is None, "left out"),
            "trainer.entropy_control": (self.trainer.entropy_control is None, "left out"),
            "export.push_to_hub": (self.export.push_to_hub is None, "left out: there is a model for each policy"),
        }
        for name, (holds, rule) in kept.items():
            if not holds:
                raise InvalidInputError(f"{name} must be {rule}, got {attrgetter(name)(self)} with policies")

    @final
    def check_one_policy(self, what: str) -> None:
        """Raise `InvalidInputError` for a run of several policies, none of whose models is the run's."""
        if self.policies is not None:
            raise InvalidInputError(
                f"policies must be left out with {what}, which loads one model, got {list(self.policies.names)}: the "
                "run itself evaluates them (evaluation.num_problems, evaluation.every)"
            )

    @final
    def _check_lora(self) -> None:
        """Raise `InvalidInputError` for what only adapters have, where there are none."""
        if self.lora is not None:
            return
        if self.model_settings.dtype is Precision.BFLOAT16:
            raise InvalidInputError(
                f"model_settings.dtype must be float32 without lora, got {self.model_settings.dtype}: smaller types "
                "round updates away; precision = bfloat16 computes the layers in it"
            )
        if self.export.merged:
            raise InvalidInputError("export.merged must be false without lora, got true: there is nothing to merge")
        if self.trainer.lora_updates is LoraUpdates.ADAPTER:
            raise InvalidInputError("trainer.lora_updates must be merged without lora, got adapter")

    @final
    def _check_objective(self) -> None:
        """Raise `InvalidInputError` for what the objective cannot use; loads torch."""
        objective = self.objective
        objective.check_config(self.training)
        if self.warm_start is not None and self.warm_start.steps > 0 and objective.needs_reference(self.training):
            raise InvalidInputError(
                f"warm_start.steps must be 0 with a reference (trainer.kl_weight, online_dpo), got "
                f"{self.warm_start.steps}: it is the model that the run begins with, and would pull back to what was "
                "before these steps. Make them a run of their own, with as many loop.num_steps, and train its model"
            )
        if self.loop.replaces_groups and not objective.can_lack_variance(self.training):
            raise InvalidInputError(
                "loop.max_replacements must be 0 where groups of equal rewards are trained on, got "
                f"{self.loop.max_replacements:g}: with a teacher, trainer.kl_weight above 0, reinforce_plus_plus or "
                "online_dpo no group is left out by itself"
            )
        if self.rollouts.group_size < (least := objective.min_group_size):
            raise InvalidInputError(
                f"rollouts.group_size must be >= {least}, got {self.rollouts.group_size}: a trajectory is compared "
                "with the others in its group (only reinforce_plus_plus compares those of all problems, and "
                "distillation none)"
            )

    @final
    def _check_exact(self) -> None:
        is_rounded, engine = self.precision is Precision.BFLOAT16, self.engine
        refused = {
            "precision": engine.kind is not EngineKind.SERVER and is_rounded != engine.starts_vllm,
            "engine.reuse_kv": engine.reuse_kv,
            "engine.processes_per_engine": engine.processes_per_engine > 1,
            "trainer.gradient_checkpointing": is_rounded and self.trainer.gradient_checkpointing,
            "trainer.lora_updates": self.adapter_rank is not None and not self._is_merged_by_engine,
        }
        for name, is_refused in refused.items():
            if is_refused:
                value = attrgetter(name)(self)
                raise InvalidInputError(
                    f"trainer.numerics must be fast with {name} = {value} and engine.kind {engine.kind}, got exact: it "
                    "is for vLLM with precision bfloat16, and for the embedded engine with float32"
                )

    @property
    def _is_merged_by_engine(self) -> bool:
        """Whether engines compute with W + B A where they get adapters, as embedded ones do, in float32; not vLLM."""
        return self.precision is Precision.FLOAT32 and not self.engine.starts_vllm

    @property
    def adapter_rank(self) -> int | None:
        """Rank of the adapters that engines get; None if they get whole weights."""
        return self.lora.rank if self.lora is not None and self.training.lora_updates is LoraUpdates.ADAPTER else None

    @property
    def chosen_model_settings(self) -> ModelSettings:
        """`model_settings`, with a type of the weights."""
        is_rounded = self.lora is not None and self.precision is Precision.BFLOAT16
        chosen = Precision.BFLOAT16 if is_rounded else Precision.FLOAT32
        return replace(self.model_settings, dtype=self.model_settings.dtype or chosen)

    @property
    def training(self) -> TrainerConfig:
        """`trainer`, with what the algorithm needs and with the correction of `loop.max_staleness`, unless it says
        otherwise.
        """
        trainer, most = replace(self.trainer, seed=self.seed), self.max_sampled_tokens
        if self.loop.max_staleness > 0:
            trainer = self.objective.for_stale_rows(trainer)
        if self.policies is not None:  # an engine has one base for all, into which no single one can be merged
            trainer = replace(trainer, lora_updates=LoraUpdates.ADAPTER)
        if self.teacher is not None and trainer.teacher_weight is None:
            trainer = replace(trainer, teacher_weight=1.0)
        if self.algorithm is Algorithm.DAPO and trainer.overlong is None:
            trainer = replace(trainer, overlong=OverlongConfig(max_tokens=most, buffer=max(most // 5, 1)))
        if self.algorithm is Algorithm.DR_GRPO and (trainer.normalization or trainer.max_trajectory_tokens) is None:
            trainer = replace(trainer, max_trajectory_tokens=most)
        return trainer

    @property
    def max_sampled_tokens(self) -> int:
        """How many tokens a rollout can sample in all of its turns."""
        rollouts = self.rollouts
        return min(rollouts.limits.max_tokens, self.max_turns * rollouts.sampling.max_tokens)

    @property
    def max_turns(self) -> int:
        """How many turns a rollout can have."""
        return self.rollouts.limits.max_turns

    @property
    def chosen_loop(self) -> LoopConfig:
        """`loop`, which with algorithm dapo replaces groups of equal rewards unless it says otherwise."""
        if self.algorithm is not Algorithm.DAPO or self.loop.max_replacements is not None:
            return self.loop
        replaces = self.objective.can_lack_variance(self.training)
        return replace(self.loop, max_replacements=DAPO_REPLACEMENTS if replaces else 0)

    @property
    def objective(self) -> PolicyGradient | OnlineDpo:
        """What the trainer minimises, by `algorithm`, `advantages`, `loss` and `pairs`."""
        return make_objective(self.algorithm, advantages=self.advantages, loss=self.loss, pairs=self.pairs)


def parse_address(text: str, *, field: str) -> tuple[str, int]:
    """Parse HOST:PORT; an `InvalidInputError` names the field."""
    host, _, port = text.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 65536):
        raise InvalidInputError(f"{field} must be HOST:PORT, such as 10.0.0.1:7600 or [::1]:7600, got {text!r}")
    return host.strip("[]"), int(port)


def read_key(path: Path | None, *, field: str) -> str | None:
    """Read a key; None without a file. Raises `InvalidInputError`, which names the field, if the file has no key."""
    if path is None:
        return None
    try:
        key = read_text(path, max_bytes=MAX_KEYS_BYTES).strip()
    except (OSError, InvalidInputError) as error:
        raise InvalidInputError(f"{field} must be a text file with the key, got {path}: {error}") from None
    if not key:
        raise InvalidInputError(f"{field} must be a text file with the key, and {path} is empty")
    return key
