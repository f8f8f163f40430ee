import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.images import image_span
from unbroken.errors import EchoError, InvalidInputError, InvariantError, SamplingError
from unbroken.types import (
    NO_VERSION,
    EncodedImage,
    FinishReason,
    LogitControls,
    SampleChunk,
    SampledSequence,
    SampleRequest,
    SampleResult,
    SamplingParams,
    StructuredOutput,
    TrainingSample,
    VersionSpan,
    check_reproducible,
    encode_image_settings,
    read_experts,
    token_ids,
    write_experts,
)
from unbroken.types.sampling import MAX_STRUCTURE


def sequence(ids=(5, 6, 2), logprobs=(-0.1, -0.2, -0.3), spans=((0, 3, 0),), **changes):
    fields = {
        "completion_ids": ids,
        "rollout_logprobs": logprobs,
        "finish_reason": FinishReason.STOP,
        "version_spans": tuple(VersionSpan(start=a, stop=b, policy_version=v) for a, b, v in spans),
    }
    return SampledSequence(**fields | changes)


def row(**changes):
    fields = {
        "token_ids": [1, 2, 3, 4],
        "sampled_mask": [False, False, True, True],
        "loss_mask": [False, False, False, True],
        "rollout_logprobs": [np.nan, np.nan, -0.1, -0.2],
        "policy_versions": [NO_VERSION, NO_VERSION, 0, 1],
        "advantages": [0, 0, 0, 0.5],
    }
    return TrainingSample(**fields | changes)


@given(st.lists(st.integers(0, 2**31 - 1)))
def test_token_ids_keep_every_id_and_cannot_be_written_to(values):
    ids = token_ids(values)
    assert ids.dtype == np.int32
    assert ids.tolist() == values
    with pytest.raises(ValueError, match="read-only"):
        ids[:] = 0


@pytest.mark.parametrize("values", [[1.5], [-1], [2**31], ["a"], [[1]], [True, False]])
def test_what_is_no_token_id_is_refused_by_name(values):
    with pytest.raises(InvalidInputError, match="prompt_ids"):
        token_ids(values, name="prompt_ids")


def test_token_ids_do_not_share_memory_that_a_caller_can_change():
    values = np.array([1, 2], dtype=np.int32)
    ids = token_ids(values)
    values[0] = 9
    assert ids.tolist() == [1, 2]


@pytest.mark.parametrize("buffer", [np.array([1, 2, 3], dtype=np.int32), bytearray(np.int32([1, 2, 3]).tobytes())])
def test_a_read_only_view_of_memory_that_can_be_written_is_copied(buffer):
    array = np.frombuffer(buffer, dtype=np.int32)
    array.flags.writeable = False
    recorded = [token_ids(array), token_ids(array[:])]
    memoryview(buffer).cast("B")[0] = 9
    assert [ids.tolist() for ids in recorded] == [[1, 2, 3]] * 2


def test_what_cannot_change_is_not_copied():
    ids = token_ids(range(65536))
    for same in (ids, ids[:1000]):
        assert np.shares_memory(token_ids(same), ids)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": (-0.1, -0.2)}, r"shape \(2,\) for 3 completion_ids"),
        ({"logprobs": (-0.1, math.nan, -0.3)}, r"rollout_logprobs\[1\] is nan"),
        ({"logprobs": (-0.1, -math.inf, -0.3)}, r"rollout_logprobs\[1\] is -inf"),
        ({"spans": ((0, 2, 0),)}, r"completion_ids\[2\] of 3 is in none"),
        ({"spans": ((0, 1, 0), (2, 3, 1))}, r"completion_ids\[1\] of 3 is in none"),
        ({"spans": ()}, r"completion_ids\[0\] of 3 is in none"),
        ({"spans": ((1, 3, 0), (0, 1, 0))}, r"must be in order .* got \[0, 1\) after 3"),
        ({"spans": ((0, 4, 0),)}, r"within 3 completion_ids, got \[0, 4\)"),
        ({"ids": (), "logprobs": (), "spans": ()}, "completion_ids is empty"),
        ({"temperature": 0.0}, "temperature"),
        ({"queue_s": -0.1}, "queue_s must be finite and >= 0, or None, got -0.1"),
        ({"queue_s": math.inf}, "queue_s must be finite and >= 0, or None, got inf"),
        ({"finish_reason": "stop"}, "must be a FinishReason"),
    ],
)
def test_i2_a_sequence_whose_facts_disagree_cannot_be_built(changes, message):
    with pytest.raises(InvariantError, match=message):
        sequence(**changes)


def test_i6_versions_may_change_inside_a_sequence():
    assert sequence(spans=((0, 1, 4), (1, 3, 5))).policy_versions.tolist() == [4, 5, 5]


def test_an_aborted_sequence_may_be_empty():
    aborted = sequence(ids=(), logprobs=(), spans=(), finish_reason=FinishReason.ABORT)
    assert len(aborted.completion_ids) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout_logprobs": [np.nan, -1.0, -0.1, -0.2]}, "finite logprob: broken at position 1"),
        ({"rollout_logprobs": [np.nan, np.nan, np.nan, -0.2]}, "finite logprob: broken at position 2"),
        ({"policy_versions": [0, NO_VERSION, 0, 1]}, "have a version: broken at position 0"),
        ({"loss_mask": [True, False, False, True]}, "sampled ids only: broken at position 0"),
        ({"advantages": [0, 0, 1, 0.5]}, "zero outside the loss mask: broken at position 2"),
        ({"advantages": [0, 0, 0, np.nan]}, "advantages are finite: broken at position 3"),
        ({"sampled_mask": [False, True]}, r"sampled_mask has shape \(2,\) for 4 token_ids"),
        (
            {"routed_experts": np.zeros((5, 1, 1), np.uint8)},
            "routed_experts has 5 entries for 4 token_ids",
        ),
        ({"images": (image_span(offset=3, length=2),)}, r"images\[0\] must .* within the 4 token_ids"),
        ({"images": (image_span(offset=1, length=2),)}, r"images\[0\] must not cover sampled ids"),
    ],
)
def test_i2_a_row_whose_facts_disagree_cannot_be_built(changes, message):
    with pytest.raises(InvariantError, match=message):
        row(**changes)


def test_guards_of_rows_and_sequences_are_quiet_at_their_bounds():
    experts = np.zeros((4, 1, 1), dtype=np.uint8)
    whole = row(routed_experts=experts, images=(image_span(offset=0, length=2),))
    assert whole.routed_experts is not None
    assert whole.routed_experts.shape == (4, 1, 1)
    assert (sequence(queue_s=0.0).queue_s, sequence().queue_s) == (0.0, None)


def chunk(*ids: int, num_logprobs: int | None = None, **changes: Any) -> SampleChunk:
    logprobs = [-0.5] * (len(ids) if num_logprobs is None else num_logprobs)
    return SampleChunk(**{"index": 0, "completion_ids": list(ids), "rollout_logprobs": logprobs} | changes)


def test_chunks_join_to_a_sequence_if_each_is_whole_and_the_last_one_ends_it():
    ending = {"finish_reason": FinishReason.STOP, "version_spans": (VersionSpan(start=0, stop=3, policy_version=1),)}
    joined = SampleChunk.join([chunk(5, 6), chunk(2, **ending)], params=SamplingParams(temperature=0.5))
    assert (joined.completion_ids.tolist(), joined.temperature) == ([5, 6, 2], 0.5)
    assert joined.finish_reason is FinishReason.STOP
    with pytest.raises(InvariantError, match="the last chunk of a completion must have a finish reason"):
        SampleChunk.join([chunk(5, 6)], params=SamplingParams())
    with pytest.raises(InvariantError, match="rollout_logprobs has 1 entries for 2 completion_ids of a chunk"):
        chunk(5, 6, num_logprobs=1)


def test_experts_are_read_as_they_were_written():
    experts = np.array([[[1, 2]], [[3, 0]]], dtype=np.uint8)
    read = read_experts(write_experts(experts))
    assert read is not None
    assert read.tolist() == experts.tolist()
    assert read_experts(None) is write_experts(None) is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"regex": ""}, "structured_output.regex must be a non-empty string, got ''"),
        ({}, "exactly one of regex, json_schema and structural_tag, got none"),
        (
            {"regex": "a" * (MAX_STRUCTURE + 1)},
            f"at most {MAX_STRUCTURE} characters, got {MAX_STRUCTURE + 1}",
        ),
        ({"json_schema": "[" * 200 + "]" * 200}, "structured_output.json_schema must be nested in at most 128 levels"),
        ({"regex": "a" * MAX_STRUCTURE}, None),
        ({"regex": "[ab]{2}" * 200}, None),  # brackets of a regex are no levels
        ({"json_schema": "[" + ",".join(["[]"] * 200) + "]"}, None),
    ],
)
def test_structures_are_refused_for_their_size_and_depth_and_for_nothing_else(fields, message):
    if message is None:
        assert StructuredOutput(**fields)
        return
    with pytest.raises(SamplingError, match=message):
        StructuredOutput(**fields)


@pytest.mark.parametrize(("name", "value"), [("top_k", 5), ("repetition_penalty", 1.1), ("top_p", 0.5)])
def test_parameters_that_change_the_distribution_are_refused_where_nobody_follows_them(name, value):
    params = SamplingParams(**{name: value})
    check_reproducible(SamplingParams(temperature=0.7, max_tokens=9, seed=3), whose="the trainer's")
    with pytest.raises(SamplingError, match=rf"^sampling.{name} must be .*, got {value}: the trainer's logprobs would"):
        check_reproducible(params, whose="the trainer's")


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logit_bias": ((3, 101.0),)}, r"^logit_bias must be pairs of an id and a number in \[-100, 100\]"),
        ({"logit_bias": ((3, 1.0), (3, 2.0))}, "^logit_bias must be .*, no id twice"),
        ({"logit_bias": tuple((number, 1.0) for number in range(1025))}, "^logit_bias must be at most 1024, .* 1025"),
        ({"bad_words_ids": ((),)}, "^bad_words_ids must be a tuple of non-empty tuples of ids"),
        ({"min_tokens": -1}, "^min_tokens must be a whole number"),
        (
            {"allowed_token_ids": (3, 4), "bad_words_ids": ((3,),), "min_tokens": 1, "stop_token_ids": (4,)},
            "^allowed_token_ids must have an id that bad_words_ids and min_tokens leave possible",
        ),
    ],
)
def test_controls_that_no_engine_could_follow_are_refused(params, message):
    with pytest.raises(SamplingError, match=message):
        SamplingParams(**params)


def test_only_what_changes_logits_is_a_control():
    assert SamplingParams(top_k=3, min_tokens=4, temperature=0.3).controls is None  # without an id that ends the turn
    controls = SamplingParams(min_tokens=4, stop_token_ids=(9, 2)).controls
    assert controls == LogitControls(min_tokens=4, stop_token_ids=(2, 9))
    assert LogitControls.from_json({"top_k": 3, **controls.to_json()}) == controls
    assert LogitControls.from_json({"top_k": 3}) is None


def test_i2_a_row_may_leave_sampled_ids_out_of_the_loss():
    assert row().loss_mask.sum() == 1


def test_i3_another_prompt_than_was_sent_is_refused_with_the_place():
    request = SampleRequest(request_id="r", prompt_ids=[1, 2, 3])
    with pytest.raises(EchoError, match="first at position 1"):
        SampleResult(prompt_ids=[1, 9, 3], sequences=(sequence(),)).check_answers(request)
    with pytest.raises(EchoError, match="first at position 2"):
        SampleResult(prompt_ids=[1, 2], sequences=(sequence(),)).check_answers(request)
    with pytest.raises(EchoError, match="n=1 completions, got 2"):
        SampleResult(prompt_ids=[1, 2, 3], sequences=(sequence(), sequence())).check_answers(request)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.lists(st.integers(0, 9), max_size=8))
def test_i3_exactly_equal_prompts_pass(sent, reported):
    request = SampleRequest(request_id="r", prompt_ids=sent)
    result = SampleResult(prompt_ids=reported, sequences=(sequence(),))
    if sent == reported:
        result.check_answers(request)
    else:
        with pytest.raises(EchoError):
            result.check_answers(request)


OUT_OF_RANGE = [
    ("max_tokens", 0),
    ("max_tokens", 2**31),
    ("temperature", -1.0),
    ("temperature", math.nan),
    ("temperature", 1e-40),
    ("temperature", 1e300),
    ("top_k", -1),
    ("top_k", 2**63),
    ("top_p", 0.0),
    ("top_p", 1.5),
    ("min_p", -0.1),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", 1e-40),
    ("presence_penalty", math.inf),
    ("frequency_penalty", math.nan),
    ("frequency_penalty", 1e300),
    ("seed", -1),
    ("stop_token_ids", (-3,)),
    ("stop_token_ids", (2**31,)),
    ("stop_strings", ("",)),
]
OF_THE_WRONG_TYPE = [
    ("max_tokens", 2.5),
    ("max_tokens", True),
    ("temperature", None),
    ("temperature", "1"),
    ("temperature", True),
    ("top_k", 0.5),
    ("top_p", None),
    ("seed", 1.5),
    ("stop_token_ids", 5),
    ("stop_token_ids", [5]),
    ("stop_token_ids", (2.5,)),
    ("stop_strings", "</s>"),
    ("stop_strings", (5,)),
]


@pytest.mark.parametrize(("field", "value"), OUT_OF_RANGE + OF_THE_WRONG_TYPE)
def test_sampling_parameters_of_the_wrong_kind_or_size_are_refused_with_field_rule_and_value(field, value):
    with pytest.raises(SamplingError, match=rf"^{field} must be .*, got {re.escape(repr(value))}$"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", 0), ("temperature", 0.01), ("top_k", np.int64(5)), ("top_p", np.float32(0.5)), ("top_p", 1e-30)],
)
def test_numbers_of_every_kind_are_sampling_parameters(field, value):
    assert getattr(SamplingParams(**{field: value}), field) == value


@pytest.mark.parametrize(
    ("field", "value"),
    [("request_id", ""), ("request_id", 7), ("prompt_ids", []), ("n", 0), ("n", 1.0), ("n", True), ("params", None)],
)
def test_a_request_that_cannot_be_served_is_refused(field, value):
    with pytest.raises(SamplingError, match=rf"^{field} must .*, got "):
        SampleRequest(**{"request_id": "r", "prompt_ids": [1]} | {field: value})


def test_an_image_is_named_by_its_bytes_and_equal_settings_are_equal_texts():
    assert EncodedImage(b"abc").sha256.startswith("ba7816bf8f01cfea")
    assert EncodedImage(b"abc") == EncodedImage(b"abc") != EncodedImage(b"abd")
    assert encode_image_settings({"b": 1, "a": [2]}) == encode_image_settings({"a": [2], "b": 1}) == '{"a":[2],"b":1}'
    with pytest.raises(InvalidInputError, match=r"must be a JSON object, got .*nan"):
        encode_image_settings({"a": float("nan")})


def test_an_image_span_has_ids():
    assert image_span(offset=3, length=2).stop == 5
    with pytest.raises(InvariantError, match="length >= 1"):
        image_span(offset=0, length=0)


@pytest.mark.parametrize(
    ("spans", "said"),
    [([(0, 2), (1, 1)], r"images\[1\] must start after"), ([(2, 2)], r"images\[0\] must .* within the 3 prompt_ids")],
)
def test_the_images_of_a_request_stand_in_order_inside_its_prompt(spans, said):
    images = tuple(image_span(offset=offset, length=length) for offset, length in spans)
    with pytest.raises(SamplingError, match=said):
        SampleRequest(request_id="r", prompt_ids=[1, 2, 3], images=images)


def test_the_images_of_a_request_have_one_setting():
    images = (image_span(offset=0, length=1), replace(image_span(offset=1, length=1), settings='{"a":1}'))
    with pytest.raises(SamplingError, match=r"images\[1\] must have the same settings as the other images"):
        SampleRequest(request_id="r", prompt_ids=[1, 2, 3], images=images)


def test_an_answer_about_other_images_is_no_answer():
    request = SampleRequest(request_id="r", prompt_ids=[1, 7, 2], images=(image_span(offset=1, length=1),))
    with pytest.raises(EchoError, match="reports the images"):
        SampleResult(prompt_ids=[1, 7, 2], sequences=()).check_prompt(request)
    names = tuple(span.sha256 for span in request.images)
    SampleResult(prompt_ids=[1, 7, 2], sequences=(), image_sha256s=names).check_prompt(request)


@pytest.mark.parametrize("values", [[[1], [1, 2]], [1, [2]], 5, None, [1, None], [1, "2"], [2**70], [1.0], [[1, 2]]])
def test_ids_that_are_no_list_of_whole_numbers_are_an_input_error(values: Any) -> None:
    with pytest.raises(InvalidInputError, match="prompt_ids must be"):
        token_ids(values, name="prompt_ids")
