"""How the weights are drawn; the package's docstring says what they must achieve."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def randomise(model: torch.nn.Module) -> None:
    """Draw all weights anew; see the module's docstring for what they must achieve."""
    import torch

    wide = {"q_proj": 1.5, "k_proj": 1.5, "lm_head": 3.0, "gate": 2.0, "in_proj_ba": 1.5, "in_proj_a": 1.5}
    with torch.no_grad():
        for path, p in model.named_parameters():
            leaf = path.removesuffix(".weight").rsplit(".", 1)[-1]
            if leaf == "A_log":
                p.uniform_(math.log(0.003), math.log(1.0))
            elif leaf == "dt_bias":
                p.uniform_(-1.0, 1.0)
            elif leaf in ("embed_tokens", "word_embeddings"):
                p.normal_()
            elif p.dim() == 1:
                p.add_(0.1 * torch.randn_like(p))
            else:
                p.normal_(std=wide.get(leaf, 1.0) / math.sqrt(p.shape[-1]))
