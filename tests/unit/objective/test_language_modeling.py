"""Language modelling: means over the tokens that count, and what is said of them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ddp_train.errors import ConfigError
from ddp_train.interfaces.objective import loss_sum
from ddp_train.model.gpt import GPT
from ddp_train.objective.language_modeling import LanguageModeling, find_head
from tests.unit.objective.batches import IDENTITY, mean_loss, reported, token_model_and_batch
from tests.unit.parts import components


def test_perplexity_and_bits_per_byte_of_a_uniform_guess_are_the_vocabulary() -> None:
    objective = LanguageModeling(bytes_per_token=4.0)
    metrics = reported(objective, IDENTITY, (torch.zeros(2, 3, 256), torch.zeros(2, 3, dtype=torch.int64)))
    assert list(metrics) == list(objective.goals) == ["loss", "perplexity", "bits_per_byte"]
    assert metrics == pytest.approx({"loss": math.log(256), "perplexity": 256, "bits_per_byte": 8 / 4})


def test_bits_per_byte_is_absent_where_the_bytes_are_unknown() -> None:
    objective = LanguageModeling()
    assert list(objective.metrics({"loss": 2.0})) == list(objective.goals) == ["loss", "perplexity"]


def test_a_huge_loss_gives_infinite_perplexity_and_no_crash() -> None:
    assert LanguageModeling().metrics({"loss": 1e6})["perplexity"] == math.inf


def test_the_number_of_tokens_is_a_plain_int_unless_targets_must_be_read() -> None:
    model, batch = token_model_and_batch()
    num_tokens = loss_sum(LanguageModeling(), model, batch).num_units
    assert type(num_tokens) is int and num_tokens == 48
    counted = loss_sum(LanguageModeling(ignore_index=3), model, batch).num_units
    assert isinstance(counted, Tensor) and counted.dtype == torch.int64 and counted.shape == () and counted == (batch[1] != 3).sum()


def test_a_negative_target_is_an_error_unless_it_was_said_to_be_ignored() -> None:
    batch = (torch.zeros(1, 2, 5), torch.tensor([[1, -100]]))
    assert mean_loss(LanguageModeling(ignore_index=-100), IDENTITY, batch) == pytest.approx(math.log(5))
    with pytest.raises(IndexError, match="-100"):
        LanguageModeling().loss(IDENTITY, batch)


VOCABULARY = 1000
IGNORED = 7


def model_and_batch() -> tuple[GPT, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = GPT(VOCABULARY, 16, num_layers=1, num_heads=2, width=8)
    tokens = torch.randint(VOCABULARY, (5, 17))
    targets = tokens[:, 1:].clone()
    targets[2, 3:] = IGNORED
    return model, (tokens[:, :-1], targets)


def met(model: nn.Module, chunk_tokens: int | None, **given: str) -> LanguageModeling:
    objective = LanguageModeling(chunk_tokens=chunk_tokens, ignore_index=IGNORED, **given)  # type: ignore[arg-type]
    objective.bind_model(model)
    return objective


@pytest.mark.parametrize("chunk_tokens", [1, 7, 16, 80, 1000])  # a last chunk that is smaller, one chunk, more than there are
def test_loss_gradients_and_evaluation_are_those_of_all_tokens_at_once(chunk_tokens: int) -> None:
    model, batch = model_and_batch()
    whole, chunked = met(model, None), met(model, chunk_tokens)
    loss = loss_sum(whole, model, batch)
    loss.total.backward()
    expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    found = loss_sum(chunked, model, batch)
    found.total.backward()
    torch.testing.assert_close(found, loss, rtol=1e-6, atol=0)
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], expected, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        assert reported(chunked, model, batch) == pytest.approx(reported(whole, model, batch), rel=1e-6)
        in_chunks, at_once = chunked.evaluate(model, batch), whole.evaluate(model, batch)
        logits = model(batch[0])  # the model is as it was
    torch.testing.assert_close(in_chunks.rows, at_once.rows, rtol=1e-6, atol=0)
    assert in_chunks.compared is None and at_once.compared is not None
    assert torch.equal(at_once.compared[0], logits) and torch.equal(at_once.compared[1], batch[1])


def most_saved(objective: LanguageModeling, model: nn.Module, batch: tuple[Tensor, Tensor]) -> int:
    """Return the elements of the largest tensor that forward keeps for backward."""
    sizes = [0]

    def keep(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss_sum(objective, model, batch)
    return max(sizes)


def test_no_logits_are_kept() -> None:
    model, batch = model_and_batch()
    assert most_saved(met(model, None), model, batch) == 80 * VOCABULARY
    assert most_saved(met(model, 8), model, batch) == 80 * 4 * 8  # what the perceptron widens to


class Capped(GPT):
    def forward(self, tokens_BT: Tensor) -> Tensor:
        return 30 * torch.tanh(super().forward(tokens_BT) / 30)


def test_a_model_that_changes_its_heads_output_is_refused() -> None:
    torch.manual_seed(0)
    model, batch = Capped(VOCABULARY, 16, num_layers=1, num_heads=2, width=8), model_and_batch()[1]
    with pytest.raises(ConfigError, match=r"head \(Linear\) does not give what the model gives: the model changes it"):
        met(model, 8).loss(model, batch)
    assert "forward" not in vars(model.head)


def test_a_copy_of_what_the_head_gives_is_taken() -> None:
    model, batch = model_and_batch()
    expected = mean_loss(met(model, None), model, batch)
    model.register_forward_hook(lambda module, given, output: output.clone())  # as a strategy does
    assert mean_loss(met(model, 8), model, batch) == pytest.approx(expected, rel=1e-6)


def test_the_head_is_found_by_its_name_and_a_wrong_one_is_named() -> None:
    model, _ = model_and_batch()
    assert find_head(model, "auto") == ("head", model.head)
    assert find_head(model, "blocks.0") == ("blocks.0", model.blocks[0])
    with pytest.raises(ConfigError, match=r"is lm_head, which the GPT does not have(.|\n)*the model has token_embedding"):
        met(model, 8, head="lm_head")
    with pytest.raises(ConfigError, match="is auto, and no module of the Sequential is called head"):
        met(nn.Sequential(nn.Linear(2, 2)), 8)
    said = nn.Module()
    said.add_module("decoder", nn.Linear(2, 2))
    said.get_output_embeddings = lambda: said.decoder  # type: ignore[assignment]  # as transformers have it
    assert find_head(said, "auto")[0] == "decoder"


def test_a_run_meets_its_model() -> None:
    text = ["data=char_text", "model=gpt", "objective=language_modeling", "data.path=README.md", "data.context_length=8"]
    small = ["model.num_layers=1", "model.num_heads=2", "model.width=8", "optimizer=sgd", "trainer.max_steps=1", "scheduler=constant"]
    parts = components(*text, *small, "objective.chunk_tokens=16", base=[])
    batch = parts.train_loader.peek().batch
    whole = components(*text, *small, base=[])
    chunked, expected = (each.loss(batch, each.turns.plain) for each in (parts, whole))
    torch.testing.assert_close(chunked, expected, rtol=1e-6, atol=0)
