"""Retokenisation drift: how many random ids of the vocabulary change when decoded and encoded again.

This is the worst case: a model mostly samples the ids that its tokenizer would choose.
"""

from __future__ import annotations

import difflib
import random

from unbroken.audit.report import DriftFinding
from unbroken.audit.subject import Subject

NUM_SEQUENCES, NUM_IDS = 200, 32


def find_drift(subject: Subject, *, seed: int) -> DriftFinding:
    """Decode and encode random sequences of ordinary ids."""
    rng = random.Random(seed)
    control = subject.facts.control_tokens.ids
    vocabulary = subject.tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False)
    ids = sorted(set(vocabulary.values()) - control)
    num_sequences = num_ids = 0
    for _ in range(NUM_SEQUENCES):
        before = rng.choices(ids, k=NUM_IDS)
        after = subject.encode(subject.decode(before))
        matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
        num_sequences += before != after
        num_ids += NUM_IDS - sum(block.size for block in matcher.get_matching_blocks())
    return DriftFinding(
        num_sequences=NUM_SEQUENCES,
        num_ids=NUM_SEQUENCES * NUM_IDS,
        num_sequences_changed=num_sequences,
        num_ids_changed=num_ids,
    )
