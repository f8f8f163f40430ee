"""A reward model: a sequence classifier with one output, which scores conversations.

It renders conversations with its own chat template and tokenizer, so it may be of another family than the policy.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification

from unbroken.decoder_config import DecoderConfig
from unbroken.errors import InvalidInputError, RewardError
from unbroken.messages import Message
from unbroken.rendering.loader import load_renderer
from unbroken.types import TokenIds


class RewardModel:
    """Scores conversations; called with `messages` as a reward function is."""

    def __init__(self, source: str | Path, *, batch_size: int = 8, device: str | torch.device | None = None) -> None:
        """Load a folder or a model of the hub, in the type it was saved in, on the GPU if there is one.

        Raises:
            InvalidInputError: it cannot be loaded, or has another number of outputs than one.
            TemplateError: its chat template is missing or does not compile.
        """
        try:
            model: Any = AutoModelForSequenceClassification.from_pretrained(source, dtype="auto")
        except (OSError, ValueError) as error:
            raise InvalidInputError(
                f"model must be a folder or the hub's name of a sequence classifier, got {str(source)!r}: {error}"
            ) from None
        if model.config.num_labels != 1:
            raise InvalidInputError(
                f"model must have one output, the reward, and {source} has {model.config.num_labels} (num_labels): is "
                "it a reward model?"
            )
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._model = model.to(self._device).eval()
        self._renderer = load_renderer(source)
        self._batch_size = batch_size
        self._lock = threading.Lock()

    def __call__(self, messages: Sequence[Sequence[Message]]) -> list[float]:
        """One number for each conversation.

        Raises `RewardError` if a conversation is longer than the model's context; nothing is cut.
        """
        rows = [self._renderer.render_ids(conversation) for conversation in messages]
        longest = DecoderConfig(self._model.config).max_positions
        for k, ids in enumerate(rows):
            if longest is not None and len(ids) > longest:
                raise RewardError(f"messages[{k}] has {len(ids)} tokens, and the reward model takes {longest}")
        # Without an id for padding the classifier cannot tell where a padded row ends.
        size = 1 if self._model.config.get_text_config().pad_token_id is None else self._batch_size
        with self._lock:
            return [score for k in range(0, len(rows), size) for score in self._score(rows[k : k + size])]

    @torch.no_grad()
    def _score(self, rows: Sequence[TokenIds]) -> list[float]:
        padding = self._model.config.get_text_config().pad_token_id or 0
        ids_BT = torch.full((len(rows), max(map(len, rows))), padding, dtype=torch.long)
        mask_BT = torch.zeros_like(ids_BT)
        for k, ids in enumerate(rows):
            ids_BT[k, : len(ids)] = torch.from_numpy(ids.astype("int64"))
            mask_BT[k, : len(ids)] = 1
        logits_B1 = self._model(input_ids=ids_BT.to(self._device), attention_mask=mask_BT.to(self._device)).logits
        scores: list[float] = logits_B1[:, 0].float().tolist()
        return scores
