"""Continuous batching: rows start and end between steps, and each step samples one id for every ready row.

A step admits waiting rows to free slots, computes keys and values of prompt ids that are not cached (all but the last
id of each prompt, in one forward pass over all rows that need it), then feeds the last id of every ready row, draws the
next id from its logits, and ends the finished rows. Single-threaded: only the engine's worker calls it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from unbroken.engines.checks import check_unused
from unbroken.engines.transformers.forward import SlotForward, is_out_of_memory
from unbroken.engines.transformers.images import ImageFeatures
from unbroken.engines.transformers.jobs import Job, Row
from unbroken.engines.transformers.sampling import compute_logprobs, draw, find_kept, find_top
from unbroken.engines.transformers.slots import MIN_COPY, Claim, SlotTable
from unbroken.errors import EngineError
from unbroken.logit_edits import LogitEdits
from unbroken.types import ControlSpan, FinishReason, RoutedExperts, TokenIds, get_expert_dtype, token_ids

_NO_IDS = token_ids([])
_MAX_PREFILL_WAIT = 2
"""Steps that a few new prompts wait for more: a forward pass for each would slow down all rows that sample."""
_ROWS_PER_WAITING_PROMPT = 8
"""New prompts wait only if there are more rows than this for each of them."""
MAX_MASK = 2**26
"""Positions that the mask of one forward pass may have: rows x ids x positions read. Memory and time of a long prompt's
masks would grow with the square of its length; a pass takes fewer ids instead."""

_LONG_SHARE = 4
"""Beside others, a pass over a long prompt has a quarter of `MAX_MASK`. If a pass over all rows that sample would read
more than that, those of a quarter of the longest one's length have a pass to themselves."""

Decode = Callable[[list[int]], str]
"""Turns completion ids into the text in which stop strings are searched."""


@dataclass(slots=True, kw_only=True)
class BatchStats:
    """Counters of a batch since it was made."""

    num_steps: int = 0
    num_sampled: int = 0
    num_prefilled: int = 0
    """Prompt ids computed, without each prompt's last; ids recomputed after new weights count again."""
    num_reused: int = 0
    """Prompt ids whose keys and values came from the prefix cache."""


class ContinuousBatch:
    """The rows of all requests, over one model."""

    def __init__(
        self,
        forward: SlotForward,
        *,
        max_batch: int,
        context_length: int,
        max_prefill_tokens: int,
        decode: Decode | None,
    ) -> None:
        self.policy_version = 0
        self.stats = BatchStats()
        self._forward = forward
        self._max_prefill_tokens = max_prefill_tokens
        self._decode = decode
        self._table = SlotTable(max_slots=max_batch, context_length=context_length, experts=_make_experts(forward))
        self._jobs: dict[str, Job] = {}
        self._waiting: deque[Row] = deque()
        self._rows: dict[int, Row] = {}
        self._steps_waited = 0
        self._long_waits_until_s = 0.0
        """When a prompt of several passes may have its next one."""
        self._fences: list[frozenset[Job]] = []
        """Only rows of jobs that are in all fences are admitted."""

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._jobs) if not self._fences else any(map(self._passes, self._jobs.values()))

    @property
    def is_empty(self) -> bool:
        """Whether no request is in flight, a waiting one included."""
        return not self._jobs

    def submit(self, job: Job) -> None:
        """Queue a request's rows, first come, first served; `SamplingError` if its request id is in use."""
        request_id = job.request.request_id
        check_unused(request_id, self._jobs)
        self._jobs[request_id] = job
        self._waiting.extend(job.rows)

    def hold_new(self) -> frozenset[Job]:
        """Make new jobs wait until `admit_again`; returns the jobs in flight, which continue."""
        fence = frozenset(self._jobs.values())
        self._fences.append(fence)
        return fence

    def has_any(self, fence: frozenset[Job]) -> bool:
        """Whether one of these jobs is still in flight."""
        return not fence.isdisjoint(self._jobs.values())

    def admit_again(self, fence: frozenset[Job]) -> None:
        """Remove a fence of `hold_new`."""
        self._fences.remove(fence)

    @torch.inference_mode()
    def step(self) -> None:
        """Sample one id for every ready row."""
        self._admit()
        self._prefill()
        self._sample()
        self.stats.num_steps += 1

    def abort(self, request_id: str) -> None:
        """End a request's rows with the ids they have; unknown requests are ignored."""
        if request_id in self._jobs:
            self.abort_job(self._jobs[request_id])

    def abort_job(self, job: Job) -> None:
        """End this job if it is still in flight, but not a later one with the same request id."""
        if self._jobs.get(job.request.request_id) is not job:
            return
        for row in self._leave_queue(job):
            row.finish(row.prompt_keys, np.zeros(row.prompt_length, dtype=np.float32), FinishReason.ABORT)
        for slot in self._slots_of(job):
            self._finish(slot, FinishReason.ABORT)
        del self._jobs[job.request.request_id]

    def abort_all(self) -> None:
        """End every request with the ids it has."""
        for job in list(self._jobs.values()):
            self.abort_job(job)

    def fail_without(self, adapters: Collection[int]) -> None:
        """Fail the requests whose adapter is none of these: an update has come without it."""
        for job in [each for each in self._jobs.values() if each.adapter not in adapters]:
            self._fail(job, EngineError(f"the update left out adapter {job.request.adapter!r}, with which it samples"))

    def fail_all(self, cause: BaseException) -> None:
        """Fail every request with an `EngineError` of this cause."""
        for job in self._jobs.values():
            error = EngineError(f"the engine failed while it sampled: {cause!r}")
            error.__cause__ = cause
            job.answer.fail(error)
        self._jobs.clear()
        self._waiting.clear()
        self._rows.clear()

    def begin_version(self, policy_version: int, *, reuse_kv: bool) -> None:
        """Give ids sampled from now on a new `policy_version` (I6)."""
        self.policy_version = policy_version
        for slot, row in self._rows.items():
            row.begin_version(int(self._table.length[slot]) - row.prompt_length, policy_version)
        if not reuse_kv:
            self._drop_all_kv()

    def reset_prefix_cache(self) -> None:
        """Drop the keys and values of idle slots."""
        self._table.forget(running=False)

    def sleep(self) -> None:
        """Give back the memory of weights, keys and values; no request may run."""
        self._table.forget(running=False)
        self._forward.sleep()

    def _admit(self) -> None:
        """Give slots to waiting rows.

        The prefix that a row shares with the next one is computed before the next is admitted, so that it can be
        copied: rollouts share their system prompt, and the completions of a request their whole prompt.
        """
        table = self._table
        while self._waiting and table.has_room and self._passes(self._waiting[0].job):
            row = self._waiting.popleft()
            if (claim := self._claim(row)) is None:
                continue
            if claim.copy_from != claim.slot:
                self._forward.cache.copy_prefix(claim.copy_from, claim.slot, claim.num_cached)
                table.copy_experts(claim.copy_from, claim.slot, claim.num_cached)
            self.stats.num_reused += claim.num_cached
            row.begin(self.policy_version)
            if self._waiting and _num_shared(row, self._waiting[0]) >= claim.num_cached + MIN_COPY:
                self._prefill()

    def _claim(self, row: Row) -> Claim | None:
        """Claim a slot for a row; None if there is no memory for it, which fails the row's request alone."""
        table = self._table
        size, claim = (table.num_slots, table.capacity), None
        try:
            claim = table.claim(row.prompt_keys, row.params, adapter=row.job.adapter)
            self._rows[claim.slot] = row
            self._forward.cache.reserve(table.num_slots, table.capacity)
        except (MemoryError, RuntimeError) as cause:
            if claim is not None and claim.copy_from != claim.slot:
                table.num_cached[claim.slot] = 0  # they were not copied
            self._fail_for_memory(row, cause)
            table.resize(*size)
            return None
        return claim

    def _passes(self, job: Job) -> bool:
        return all(job in fence for fence in self._fences)

    def _prefill(self) -> None:
        """Compute the next prompt ids of all rows that need more than their last id, in one padded forward pass.

        Beside other rows, prompts that need several passes take turns, and no more time than the others have.

        The pass has at most `max_prefill_tokens`; the rest follows in the next steps, while other rows sample. A row
        shorter than the pass repeats its last id at the same position, which stores the same keys and values again.
        """
        table = self._table
        missing = np.where(table.running, table.length - 1 - table.num_cached, 0)
        slots = np.flatnonzero(missing > 0)
        if not slots.size:
            return
        is_long = missing[slots] * table.length[slots].astype(np.int64) > MAX_MASK
        if 0 < np.count_nonzero(is_long) < np.count_nonzero(table.running):
            if not is_long.all():
                self._prefill_rows(slots[~is_long], missing, MAX_MASK)
            if (started := time.monotonic()) >= self._long_waits_until_s:
                self._prefill_rows(slots[is_long][:1], missing, MAX_MASK // _LONG_SHARE)
                ended = time.monotonic()
                self._long_waits_until_s = 2 * ended - started
            return
        if _ROWS_PER_WAITING_PROMPT * len(slots) < len(self._rows) and self._steps_waited < _MAX_PREFILL_WAIT:
            self._steps_waited += 1
            return
        self._steps_waited = 0
        self._prefill_rows(slots, missing, MAX_MASK)

    def _prefill_rows(self, slots: NDArray[np.int64], missing: NDArray[np.int64], max_mask: int) -> None:
        table = self._table
        width = min(int(missing[slots].max()), max(1, self._max_prefill_tokens // len(slots)))
        length = min(int(table.num_cached[slots].max()) + width, int(table.length[slots].max()))
        width = min(width, max(1, max_mask // (len(slots) * length)))
        counts = np.minimum(missing[slots], width)
        width += -width % self._forward.row_multiple
        offsets = np.minimum(np.arange(width), counts[:, None] - 1)
        positions = table.num_cached[slots, None] + offsets
        ids = table.ids[slots[:, None], positions]
        try:
            features, adapters = self._find_image_features(slots), table.adapters[slots]
            self._forward.prefill(slots, positions, ids, image_features=features, adapters_R=adapters)
        except (MemoryError, RuntimeError) as cause:
            self._fail_for_memory(self._find_longest(slots), cause)
            return
        if (experts := self._forward.routed_experts) is not None:
            table.store_experts(slots[:, None], positions, experts)
        table.num_cached[slots] += counts
        self.stats.num_prefilled += int(counts.sum())

    def _find_image_features(self, slots: NDArray[np.int64]) -> dict[int, ImageFeatures]:
        """Return the `ImageFeatures` of slots whose prompts have images, by their index in `slots`."""
        rows = enumerate(map(self._rows.get, slots.tolist()))
        return {index: row.job.features for index, row in rows if row is not None and row.job.features is not None}

    def _sample(self) -> None:
        table = self._table
        left = np.flatnonzero(table.running & (table.num_cached == table.length - 1))
        while left.size:
            longest = int(table.length[left].max())
            is_near = table.length[left] > longest // _LONG_SHARE
            if len(left) * longest <= MAX_MASK // _LONG_SHARE:
                is_near[:] = True
            self._sample_rows(left[is_near])
            left = left[~is_near]

    def _sample_rows(self, ready: NDArray[np.int64]) -> None:
        table = self._table
        try:
            self._reserve(int(table.length[ready].max()) + 1)
            ids, chosen, logprobs = self._draw(ready)
        except (MemoryError, RuntimeError) as cause:
            self._fail_for_memory(self._find_longest(ready), cause)
            return
        self._append(ready, ids, chosen)
        broken = ready[~np.isfinite(chosen)]
        if broken.size:
            self._fail_broken(broken)
        self._report(ready, ids, chosen, logprobs)
        self._end_rows(ready, ids)

    def _draw(self, ready: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.float32], torch.Tensor]:
        """Feed the last id of rows, and draw the next: the ids, their logprobs, and [R, V] those of all ids."""
        table = self._table
        fed = _fill_gaps(ready, multiple=self._forward.row_multiple, num_slots=table.num_slots)
        if table.num_cached[fed].max() > 2 * table.num_cached[ready].max():
            fed = ready  # all rows of a pass read as far as the longest
        positions = table.num_cached[fed, None]
        fed_ids = table.ids[fed[:, None], positions]
        features, adapters = self._find_image_features(fed), table.adapters[fed]
        logits = self._forward.decode(fed, positions, fed_ids, image_features=features, adapters_R=adapters)
        is_ready = np.isin(fed, ready)
        if (experts := self._forward.routed_experts) is not None:
            table.store_experts(ready, positions[is_ready, 0], experts[is_ready, 0])
        if len(fed) > len(ready):
            logits = logits[torch.from_numpy(np.searchsorted(fed, ready)).to(logits.device)]

        params = table.params[ready]
        logprobs = compute_logprobs(logits, params, self._find_edits(ready))
        uniforms = np.array([self._rows[slot].rng.random() for slot in ready.tolist()])
        return *draw(logprobs, params, uniforms), logprobs

    def _reserve(self, length: int) -> None:
        """Make room for `length` positions in each slot; if memory is too small, nothing has changed."""
        table = self._table
        size = table.num_slots, table.capacity
        try:
            table.reserve(length)
            self._forward.cache.reserve(table.num_slots, table.capacity)
        except (MemoryError, RuntimeError):
            table.resize(*size)
            raise

    def _find_longest(self, slots: NDArray[np.int64]) -> Row:
        """The row of which a pass needs the most memory."""
        return self._rows[int(slots[self._table.length[slots].argmax()])]

    def _fail_for_memory(self, row: Row, cause: Exception) -> None:
        """Fail the request of a row for which memory is too small; others continue. Raises any other cause again."""
        if not is_out_of_memory(cause):
            raise cause
        message = (
            f"memory is too small for request {row.request.request_id!r}, whose prompt has {row.prompt_length} ids: "
            f"send a shorter one, or less at a time ({cause})"
        )
        self._fail(row.job, EngineError(message))

    def _report(
        self, slots: NDArray[np.int64], ids: NDArray[np.int64], chosen: NDArray[np.float32], logprobs_BV: torch.Tensor
    ) -> None:
        """Give sampled ids to the rows that need each one: for top logprobs, for kept ids, or to stream them."""
        listening = [
            (index, row)
            for index, slot in enumerate(slots.tolist())
            if (row := self._rows.get(slot)) is not None and row.is_listening
        ]
        if not listening:
            return
        maximum = max(row.params.num_top_logprobs for _, row in listening)
        top_logprobs, top_ids = find_top(logprobs_BV, maximum)
        cut = [index for index, row in listening if row.returns_kept_ids]
        kept = dict(zip(cut, find_kept(logprobs_BV[cut]), strict=True)) if cut else {}
        for index, row in listening:
            number = row.params.num_top_logprobs
            top = (top_ids[index, :number], top_logprobs[index, :number]) if number else None
            row.add_sampled(int(ids[index]), float(chosen[index]), top, kept.get(index))

    def _fail_broken(self, slots: NDArray[np.int64]) -> None:
        """Fail the requests of rows whose logits are not finite; the engine continues, and new weights may help."""
        for job in {self._rows[slot].job for slot in slots.tolist()}:
            message = (
                f"the model's logits are not finite for request {job.request.request_id!r}: the weights of "
                f"policy_version {self.policy_version} are broken or overflow; load others"
            )
            if job.request.params.bad_words_ids:
                message += ". Or bad_words_ids left no id that could be sampled"
            self._fail(job, EngineError(message))
        self._drop_all_kv()  # keys and values may be broken in other rows too

    def _history(self, slot: int) -> tuple[TokenIds, TokenIds]:
        ids = self._table.ids[slot, : self._table.length[slot]]
        row = self._rows[slot]
        return row.request.prompt_ids, ids[row.prompt_length :]

    def _find_edits(self, slots: NDArray[np.int64]) -> LogitEdits | None:
        """What changes the logits of the next id of each row; None if nothing does."""
        found = []
        for slot in slots.tolist():
            row, place = self._rows[slot], self._table.length[slot, None]
            spans: tuple[ControlSpan, ...] = ()
            if row.controls is not None:
                spans = (ControlSpan(start=row.prompt_length, stop=int(place[0]) + 1, controls=row.controls),)
            found.append((np.concatenate(self._history(slot)) if spans else _NO_IDS, spans, place))
        return LogitEdits.of(found)

    def _append(self, slots: NDArray[np.int64], ids: NDArray[np.int64], logprobs: NDArray[np.float32]) -> None:
        table = self._table
        positions = table.length[slots]
        table.ids[slots, positions] = ids
        table.logprobs[slots, positions] = logprobs
        table.num_cached[slots] += 1
        table.length[slots] += 1
        self.stats.num_sampled += len(ids)

    def _end_rows(self, slots: NDArray[np.int64], ids: NDArray[np.int64]) -> None:
        """Finish rows with a stop id or a stop string, or at their limit; STOP has precedence over LENGTH."""
        table = self._table
        stopped = np.zeros(len(slots), dtype=np.bool_)
        for index, (slot, token_id) in enumerate(zip(slots.tolist(), ids.tolist(), strict=True)):
            if (row := self._rows.get(slot)) is not None:  # None: its request has just failed
                found = token_id in row.job.stop_ids
                # As vLLM, which looks for stop strings only after `min_tokens` ids.
                is_early = table.length[slot] - row.prompt_length <= row.params.min_tokens
                has_text = bool(row.params.stop_strings) and not is_early and self._has_stop_string(slot)
                stopped[index] = found or has_text
        full = table.length[slots] >= table.limit[slots]
        for index in np.flatnonzero(stopped | full).tolist():
            slot = int(slots[index])
            if slot not in self._rows:
                continue
            row = self._rows[slot]
            self._finish(slot, FinishReason.STOP if stopped[index] else FinishReason.LENGTH)
            if row.job.is_done:
                del self._jobs[row.request.request_id]

    def _has_stop_string(self, slot: int) -> bool:
        """Whether the completion's text contains a stop string; a `decode` that raises fails only its own request.

        The whole completion is decoded at every step, which is quadratic: with a byte-level BPE about 0.16 us an id, so
        0.6 ms a step for each row of 4,096 ids, and all rows wait. Decoding a tail would not be safe: many ids may have
        no text, and the text of an id may depend on those before it. Stop ids cost nothing.
        """
        assert self._decode is not None  # else the engine has refused the request
        row = self._rows[slot]
        _, completion_ids = self._history(slot)
        try:
            text = self._decode(completion_ids.tolist())
            return any(stop in text for stop in row.params.stop_strings)
        except Exception as cause:
            error = EngineError(f"decode failed on the completion of request {row.request.request_id!r}: {cause!r}")
            error.__cause__ = cause
            self._fail(row.job, error)
            return False

    def _finish(self, slot: int, finish_reason: FinishReason) -> None:
        row = self._rows.pop(slot)
        length = int(self._table.length[slot])
        row.finish(
            self._table.ids[slot, :length].copy(),
            self._table.logprobs[slot, :length].copy(),
            finish_reason,
            self._table.get_experts(slot) if row.params.return_routed_experts else None,
        )
        self._table.release(slot)

    def _fail(self, job: Job, error: EngineError) -> None:
        self._leave_queue(job)
        for slot in self._slots_of(job):
            del self._rows[slot]
            self._table.release(slot)
        del self._jobs[job.request.request_id]
        job.answer.fail(error)

    def _leave_queue(self, job: Job) -> list[Row]:
        rows = [row for row in self._waiting if row.job is job]
        for row in rows:
            self._waiting.remove(row)
        return rows

    def _slots_of(self, job: Job) -> list[int]:
        return [slot for slot, row in self._rows.items() if row.job is job]

    def _drop_all_kv(self) -> None:
        """Drop all keys and values; running rows compute theirs again."""
        self._table.forget(running=True)
        self._forward.cache.erase()
        for job in self._jobs.values():
            if job.features is not None:
                job.features.computed.clear()


def _make_experts(forward: SlotForward) -> RoutedExperts | None:
    """[0, 0, L, K] experts of no slots, if the model's are recorded."""
    if (routers := forward.routers) is None:
        return None
    experts: RoutedExperts = np.zeros((0, 0, routers.num_layers, routers.top_k), get_expert_dtype(routers.num_experts))
    return experts


def _num_shared(row: Row, other: Row) -> int:
    """Count the leading ids that two rows' prompts have in common."""
    width = min(row.prompt_length, other.prompt_length)
    same = row.prompt_keys[:width] == other.prompt_keys[:width]
    return width if same.all() else int(same.argmin())


def _fill_gaps(slots: NDArray[np.int64], *, multiple: int, num_slots: int) -> NDArray[np.int64]:
    """Add the few slots between `slots`: consecutive slots are read without copying keys and values. Then add those
    behind or before them for a `multiple` of rows, where there are as many.

    An added slot feeds an arbitrary id at the first position that is not cached. Its keys and values are never used:
    the row that needs the position stores its own there first.
    """
    span = int(slots[-1] - slots[0]) + 1
    if span > 1.25 * len(slots):
        return slots
    wanted = span + -span % multiple
    first = min(int(slots[0]), max(num_slots - wanted, 0))
    return np.arange(first, first + wanted) if wanted <= num_slots else np.arange(slots[0], slots[0] + span)
