"""The shared data types: token ids and what is known about them, from the engine to the optimiser.

Shapes: T is the length of a whole sequence, C the length of a completion. Token ids are int32, logprobs float32 natural
logarithms. All types are immutable and checked when built, so no later stage has to make lengths fit.
"""

from unbroken.types.arrays import BoolMask, Logprobs, TokenIds, freeze, is_real, is_whole, token_ids
from unbroken.types.controls import ControlSpan, LogitControls
from unbroken.types.images import EncodedImage, ImageSpan, encode_image_settings, find_misplaced_span
from unbroken.types.recorded import (
    KeptIds,
    RoutedExperts,
    get_expert_dtype,
    read_experts,
    read_kept_ids,
    routed_experts,
    write_experts,
    write_kept_ids,
)
from unbroken.types.sampling import (
    TEMPERATURE_RANGE,
    InFlight,
    Numerics,
    SampleRequest,
    SamplingParams,
    StructuredOutput,
    WeightPlacement,
    WeightReceipt,
    check_reproducible,
)
from unbroken.types.sequences import (
    NO_VERSION,
    FinishReason,
    SampleChunk,
    SampledSequence,
    SampleResult,
    ScoredSequence,
    TopLogprobs,
    TrainingSample,
    VersionSpan,
)

__all__ = [
    "NO_VERSION",
    "TEMPERATURE_RANGE",
    "BoolMask",
    "ControlSpan",
    "EncodedImage",
    "FinishReason",
    "ImageSpan",
    "InFlight",
    "KeptIds",
    "LogitControls",
    "Logprobs",
    "Numerics",
    "RoutedExperts",
    "SampleChunk",
    "SampleRequest",
    "SampleResult",
    "SampledSequence",
    "SamplingParams",
    "ScoredSequence",
    "StructuredOutput",
    "TokenIds",
    "TopLogprobs",
    "TrainingSample",
    "VersionSpan",
    "WeightPlacement",
    "WeightReceipt",
    "check_reproducible",
    "encode_image_settings",
    "find_misplaced_span",
    "freeze",
    "get_expert_dtype",
    "is_real",
    "is_whole",
    "read_experts",
    "read_kept_ids",
    "routed_experts",
    "token_ids",
    "write_experts",
    "write_kept_ids",
]
