"""The text that is shown."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from ddp_train.callbacks.generated_text import GeneratedText
from ddp_train.errors import ConfigError
from tests.unit.callbacks.fake_run import FakeRun


class Counting(nn.Module):
    """Says with certainty that the next token is one more; answers like a model of transformers."""

    def forward(self, tokens_BT: Tensor) -> SimpleNamespace:
        assert tokens_BT.shape[1] <= 5
        return SimpleNamespace(logits=1000.0 * nn.functional.one_hot((tokens_BT + 1) % 10, 10))


class Letters:
    def decode(self, tokens: list[int]) -> str:
        return "".join("abcdefghij"[token] for token in tokens)


def test_the_model_goes_on_from_the_data() -> None:
    run = FakeRun(model=Counting(), data=Letters(), batch=(torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 0]]), torch.zeros(2, 5)))
    text = GeneratedText(prompt_tokens=2, num_tokens=6)
    text.on_start(run)
    text.on_evaluation(run, {})
    assert run.logged["samples/text"] == "bcdefghi\n\n---\n\nghijabcd"
    silent = FakeRun(rank=1, data=Letters())
    text.on_evaluation(silent, {})
    assert silent.logged == {}


def test_tokens_without_a_tokenizer_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"tiktoken\.get_encoding"):
        GeneratedText().on_start(FakeRun())
    GeneratedText(tokenizer=Letters()).on_start(FakeRun())
    with pytest.raises(ValueError, match="no tokens"):
        GeneratedText().on_evaluation(FakeRun(batch=(torch.zeros(2, 3), torch.zeros(2))), {})
