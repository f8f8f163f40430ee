"""What callers see of vLLM's errors."""

from __future__ import annotations

import pytest

from unbroken.errors import EngineError, SamplingError


def test_what_vllm_refuses_for_a_time_is_a_failure_of_the_engine_and_not_of_the_request() -> None:
    from vllm.exceptions import RetryableRequestError

    from unbroken.engines.vllm.calls import translate_errors

    with pytest.raises(EngineError, match="RetryableRequestError: Generation is paused"), translate_errors():
        raise RetryableRequestError("Generation is paused")


def test_a_refusal_names_vllms_reason() -> None:
    from vllm.exceptions import VLLMValidationError

    from unbroken.engines.vllm.calls import translate_errors

    with pytest.raises(SamplingError, match="vLLM refuses the request: Token id 9 is out"), translate_errors():
        raise VLLMValidationError("Token id 9 is out of vocabulary")
