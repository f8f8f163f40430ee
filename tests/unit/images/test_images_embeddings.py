"""Ids that a policy sampled and that mean an image: the model's embeddings see them, its search for images does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from unbroken.images.embeddings import replace_sampled_placeholders


class Model:
    """Its embedding layer is all there is."""

    def __init__(self) -> None:
        self.embeddings = torch.nn.Embedding(8, 2)

    def get_input_embeddings(self) -> torch.nn.Embedding:
        return self.embeddings


@pytest.mark.parametrize("call", [lambda layer, ids: layer(ids), lambda layer, ids: layer(input=ids)])
def test_a_sampled_placeholder_has_its_own_embedding_however_the_layer_is_called(call: Any) -> None:
    model, ids, types = Model(), torch.tensor([[3, 7, 7, 4]]), torch.tensor([[0, 1, 0, 0]])
    with replace_sampled_placeholders(model, ids, types) as fed:
        assert fed.tolist() == [[3, 7, 0, 4]]
        assert torch.equal(call(model.embeddings, fed), model.embeddings.weight[ids])
    assert torch.equal(call(model.embeddings, fed), model.embeddings.weight[fed])
