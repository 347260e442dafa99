"""A decoder in plain torch (RMSNorm, rotary, SwiGLU, explicit softmax): what both tools can run, without Megatron.

Imported by path in an interpreter that has torch and nothing of this package.
"""

import torch
from torch import nn
from torch.nn import functional

# Hidden size, sequence length, layers, dtype.
SIZES = {
    "h64": (64, 32, 4, torch.float32),
    "h512": (512, 256, 4, torch.bfloat16),
    "h1024": (1024, 512, 4, torch.float32),
}
VOCABULARY = 1024


class Norm(nn.Module):
    """Root mean square norm, written out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension."""
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
        return (x.float() * scale).to(x.dtype) * self.weight


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions for (batch, heads, sequence, channels)."""
    half, length = x.shape[-1] // 2, x.shape[-2]
    frequencies = 10000 ** (-torch.arange(half, device=x.device) / half)
    angle = torch.arange(length, device=x.device)[:, None] * frequencies[None, :]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    left, right = x[..., :half], x[..., half:]
    return torch.cat((left * cos - right * sin, left * sin + right * cos), -1)


class Attention(nn.Module):
    """Causal attention by two matrix products and a softmax in float32."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.linear_qkv = nn.Linear(width, 3 * width)
        self.linear_proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend."""
        batch, length, width = x.shape
        q, k, v = self.linear_qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = torch.matmul(rotate(q), rotate(k).transpose(-1, -2)) / (width // self.heads) ** 0.5
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        weights = functional.softmax(scores.masked_fill(mask, -1e4).float(), -1).to(x.dtype)
        found: torch.Tensor = self.linear_proj(torch.matmul(weights, v).transpose(1, 2).reshape(batch, length, width))
        return found


class Mlp(nn.Module):
    """Gated by SiLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = 64 * max(1, round(width * 8 / 3 / 64))
        self.linear_fc1 = nn.Linear(width, 2 * inner)
        self.linear_fc2 = nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Two linears with a gate between."""
        gate, up = self.linear_fc1(x).chunk(2, -1)
        found: torch.Tensor = self.linear_fc2(functional.silu(gate) * up)
        return found


class Layer(nn.Module):
    """Attention and MLP, each behind a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.input_layernorm, self.pre_mlp_layernorm = Norm(width), Norm(width)
        self.self_attention, self.mlp = Attention(width, max(4, width // 64)), Mlp(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add both to the residual stream."""
        x = x + self.self_attention(self.input_layernorm(x))
        found: torch.Tensor = x + self.mlp(self.pre_mlp_layernorm(x))
        return found


class PlainGpt(nn.Module):
    """The whole decoder; returns the mean loss of predicting the next token."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.final_layernorm = Norm(width)
        self.output_layer = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Loss of a batch of token ids."""
        x = self.embedding(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x)
        logits = self.output_layer(self.final_layernorm(x)).float()
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def build(size: str, device: str = "cpu") -> tuple[PlainGpt, torch.optim.Optimizer, torch.Tensor]:
    """The model of a size, its optimizer and a batch, on a device."""
    width, length, layers, dtype = SIZES[size]
    torch.manual_seed(7)
    model = PlainGpt(width, layers).to(dtype).to(device)
    tokens = torch.randint(VOCABULARY, (1, length + 1)).to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), tokens
