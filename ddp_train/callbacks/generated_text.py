"""Texts that a language model writes, at every evaluation.

Shapes: B samples, T tokens, V vocabulary.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ddp_train.errors import ConfigError
from ddp_train.interfaces import Callback, Run
from ddp_train.interfaces.batch import tensors_of


class GeneratedText(Callback):
    """Lets the model continue the beginnings of the first evaluation samples, and logs the texts.

    Rank 0's texts are logged. The draws use a separate generator, the same at every evaluation: other random streams stay as they were.

    Args:
        prompt_tokens: tokens of each sample that the model is given.
        num_tokens: tokens that it writes.
        num_samples: number of texts.
        temperature: above 0; below 1 likely tokens are preferred.
        tokenizer: has `decode(tokens)`, as a component (tiktoken.get_encoding, a tokenizer of transformers); None: the
            data decodes (data=char_text).
    """

    def __init__(
        self,
        *,
        prompt_tokens: int = 16,
        num_tokens: int = 100,
        num_samples: int = 2,
        temperature: float = 0.8,
        tokenizer: Any = None,
    ) -> None:
        self._prompt_tokens, self._num_tokens, self._num_samples = prompt_tokens, num_tokens, num_samples
        self._temperature, self._tokenizer = temperature, tokenizer
        self._decode: Any = None

    def on_start(self, run: Run) -> None:
        self._decode = getattr(self._tokenizer or run.data, "decode", None)
        if self._decode is None:
            happened = "is null, and the data cannot turn tokens into text (it has no method `decode`)"
            expected = "the tokenizer that made the tokens, as {_target_: tiktoken.get_encoding, encoding_name: gpt2}"
            raise ConfigError(key=".tokenizer", happened=happened, expected=expected)

    def on_evaluation(self, run: Run, metrics: Mapping[str, float]) -> None:
        if run.rank != 0 and not run.forward_is_collective:
            return
        batch = run.evaluation_batch()
        tokens_BT = next((tensor for tensor in tensors_of(batch) if tensor.ndim == 2 and not tensor.is_floating_point()), None)
        if tokens_BT is None:
            raise ValueError("the evaluation data has no tokens [B, T]")
        prompts_BT = tokens_BT[: self._num_samples, : self._prompt_tokens]
        texts = [self._decode(tokens) for tokens in self._generate(run, prompts_BT, context_length=tokens_BT.shape[1]).tolist()]
        run.log_text("samples/text", "\n\n---\n\n".join(texts))

    def _generate(self, run: Run, tokens_BT: Tensor, *, context_length: int) -> Tensor:
        """Return the tokens and the generated ones after them; the model gets the last `context_length`, as in training."""
        generator = torch.Generator(run.device).manual_seed(0)
        for _ in range(self._num_tokens):
            with torch.random.fork_rng([run.device] if run.device.type == "cuda" else []):
                logits_BTV = run.model(tokens_BT[:, -context_length:])
            logits_BTV = logits_BTV if isinstance(logits_BTV, Tensor) else next(tensors_of(getattr(logits_BTV, "logits", logits_BTV)))
            probabilities_BV = (logits_BTV[:, -1].float() / self._temperature).softmax(dim=-1)
            tokens_BT = torch.cat([tokens_BT, torch.multinomial(probabilities_BV, 1, generator=generator)], dim=1)
        return tokens_BT
