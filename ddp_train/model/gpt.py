"""A decoder-only transformer in the shape of GPT-2.

Shapes: B samples, T tokens, V vocabulary, D width, N attention heads, E width of one head (D / N).
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_train.errors import ConfigError


class GPT(nn.Module):
    """Predict the next token at every position.

    Args:
        vocab_size: V.
        context_length: the largest T; one learned position embedding each.
        num_layers: transformer blocks.
        num_heads: attention heads; must divide `width`.
        width: D, the size of the residual stream.
        dropout: probability in [0, 1), after the embeddings, in the attention and at the end of each branch.
        bias: whether linear layers and normalisations have a bias, as in GPT-2.
        gelu: "tanh", GPT-2's approximation, or "none": GELU itself.

    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners" (GPT-2: pre-norm, tanh GELU, initialisation);
        Press & Wolf 2016, arXiv:1608.05859 (the head shares the token embedding's weights).
    """

    def __init__(
        self,
        vocab_size: int,
        context_length: int,
        *,
        num_layers: int = 12,
        num_heads: int = 12,
        width: int = 768,
        dropout: float = 0.0,
        bias: bool = True,
        gelu: Literal["tanh", "none"] = "tanh",
    ) -> None:
        super().__init__()
        if width % num_heads != 0:
            happened = f"{num_heads} heads do not divide the width {width}"
            fix = f"model.width={math.ceil(width / num_heads) * num_heads}, or another model.num_heads"
            raise ConfigError(key="model.num_heads", happened=happened, expected="model.width to be a multiple of model.num_heads", fix=fix)
        self.context_length = context_length
        self.token_embedding = nn.Embedding(vocab_size, width)
        self.position_embedding = nn.Embedding(context_length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, num_heads, dropout=dropout, bias=bias, gelu=gelu) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width, bias=bias)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.head.weight = self.token_embedding.weight
        self._init_like_gpt2(num_layers)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return the logits of the next token at every position, shape [B, T, V]; T above `context_length` is a ValueError."""
        num_tokens = tokens_BT.shape[1]
        if num_tokens > self.context_length:
            why = f"a sequence of {num_tokens} tokens does not fit the context of {self.context_length}"
            raise ValueError(f"{why}: shorten the data's sequences or set model.context_length={num_tokens}")
        positions_T = torch.arange(num_tokens, device=tokens_BT.device)
        stream_BTD = self.dropout(self.token_embedding(tokens_BT) + self.position_embedding(positions_T))
        for block in self.blocks:
            stream_BTD = block(stream_BTD)
        logits_BTV: Tensor = self.head(self.norm(stream_BTD))
        return logits_BTV

    def _init_like_gpt2(self, num_layers: int) -> None:
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        # Two branches per block add to the stream; this keeps its variance independent of the depth.
        for block in self.blocks:
            assert isinstance(block, Block)
            for projection in (block.attention.project, block.mlp.project):
                nn.init.normal_(projection.weight, std=0.02 / math.sqrt(2 * num_layers))


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each on the normalised stream and added to it."""

    def __init__(self, width: int, num_heads: int, *, dropout: float, bias: bool, gelu: str) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, bias=bias)
        self.attention = CausalSelfAttention(width, num_heads, dropout=dropout, bias=bias)
        self.mlp_norm = nn.LayerNorm(width, bias=bias)
        self.mlp = FeedForward(width, dropout=dropout, bias=bias, gelu=gelu)

    def forward(self, stream_BTD: Tensor) -> Tensor:
        attended_BTD: Tensor = stream_BTD + self.attention(self.attention_norm(stream_BTD))
        output_BTD: Tensor = attended_BTD + self.mlp(self.mlp_norm(attended_BTD))
        return output_BTD


class CausalSelfAttention(nn.Module):
    """Let each token attend to itself and to the tokens before it."""

    def __init__(self, width: int, num_heads: int, *, dropout: float, bias: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.query_key_value = nn.Linear(width, 3 * width, bias=bias)
        self.project = nn.Linear(width, width, bias=bias)

    def forward(self, stream_BTD: Tensor) -> Tensor:
        heads_BT3NE = self.query_key_value(stream_BTD).unflatten(-1, (3, self.num_heads, -1))
        query_BNTE, key_BNTE, value_BNTE = (part_BTNE.transpose(1, 2) for part_BTNE in heads_BT3NE.unbind(2))
        dropout = self.dropout if self.training else 0.0
        mixed_BNTE = F.scaled_dot_product_attention(query_BNTE, key_BNTE, value_BNTE, dropout_p=dropout, is_causal=True)
        output_BTD: Tensor = self.project(mixed_BNTE.transpose(1, 2).flatten(2))
        return F.dropout(output_BTD, self.dropout, self.training)


class FeedForward(nn.Module):
    """Widen each token four times, apply GELU, and narrow it again."""

    def __init__(self, width: int, *, dropout: float, bias: bool, gelu: str) -> None:
        super().__init__()
        self.dropout, self.gelu = dropout, gelu
        self.widen = nn.Linear(width, 4 * width, bias=bias)
        self.project = nn.Linear(4 * width, width, bias=bias)

    def forward(self, stream_BTD: Tensor) -> Tensor:
        output_BTD: Tensor = self.project(F.gelu(self.widen(stream_BTD), approximate=self.gelu))
        return F.dropout(output_BTD, self.dropout, self.training)
